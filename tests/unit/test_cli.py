"""The command line: what it prints, its exit statuses, and every row of `doctor`, when all is well and when not."""

import errno
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import odd_files
from tests.support.odd_files import in_time
from vllm_lora_reload import __version__, cli, doctor, seams
from vllm_lora_reload.doctor import Check
from vllm_lora_reload.ring import Ring
from vllm_lora_reload.settings import Settings
from vllm_lora_reload.snapshot import Engine, Snapshot, digests_of, storages, write

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)  # a name only
ROOT = Path(__file__).parents[2]
TAKEN = {"state": "valid", "path": "/s/a.safetensors", "bytes": 4_000_000_000, "seconds": 2.0, "reason": None}


def only(rows: Iterable[Check]) -> tuple[str, str]:
    """Status and text of the single row."""
    (row,) = rows
    return row.status, row.detail


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's, and no change of the command's stays."""
    for name in [name for name in os.environ if "LORA_RELOAD_" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_PLUGINS", "lora_reload")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


# --- The command --------------------------------------------------------------------------------------------------


def test_help_imports_neither_torch_nor_vllm() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "vllm_lora_reload.cli", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in ("doctor", "snapshot", "demo", "bench"))
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "vllm_lora_reload" in imported
    assert not [name for name in imported if name.partition(".")[0] in ("torch", "vllm")]


def test_console_script_is_installed() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="vllm-lora-reload")
    assert script.load() is cli.main


@pytest.mark.parametrize(
    ("argv", "status"), [(["--version"], 0), ([], 2), (["nurse"], 2), (["doctor", "--cure"], 2), (["doctor", "x"], 2)]
)
def test_usage(argv: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == status
    printed = capsys.readouterr()
    assert printed.out == f"vllm-lora-reload {__version__}\n" if status == 0 else "usage:" in printed.err


@pytest.mark.parametrize("argv", [["doctor"], ["snapshot", "model", "--snapshot-dir", "/s"]])
def test_without_an_engine(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", None)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "vllm" else object())
    assert cli.main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-lora-reload: vllm cannot be found by")


ROWS = {
    "ok": Check("a", "ok", "fine"),
    "warning": Check("b", "warning", "not so good: mend it"),
    "problem": Check("c", "problem", "bad: mend it"),
}


@pytest.mark.parametrize(
    ("found", "status", "summary"),
    [
        (["ok"], 0, "no problems, no warnings"),
        (["ok", "warning"], 0, "no problems, 1 warning"),
        (["problem", "problem", "warning", "warning"], 1, "2 problems, 2 warnings"),
        (["problem"], 1, "1 problem, no warnings"),
    ],
)
def test_doctor_prints_and_exits(
    found: list[str],
    status: int,
    summary: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []

    def examine(folder: Path | None, verify: bool) -> Iterable[Check]:
        asked.append((folder, verify))
        print("vLLM says something")
        yield from (ROWS[name] for name in found)

    monkeypatch.setattr(doctor, "examine", examine)
    assert cli.main(["doctor"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == summary
    assert [line.split(maxsplit=2) for line in lines[:-1]] == [
        [row.status, row.name, row.detail] for row in (ROWS[name] for name in found)
    ]
    monkeypatch.setenv("VLLM_LORA_RELOAD_SNAPSHOT_DIR", "as it was called first")
    monkeypatch.setenv("LORA_RELOAD_SNAPSHOT_DIR", str(tmp_path))
    assert cli.main(["doctor", "--json", "--verify"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == found.count("problem") and report["warnings"] == found.count("warning")
    assert report["checks"] == [vars(ROWS[name]) for name in found]
    assert cli.main(["doctor", "--snapshot-dir", "other"]) == status
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["doctor", "--snapshot-dir=~/here"]) == status
    assert asked == [(None, False), (tmp_path, True), (Path.cwd() / "other", False), (tmp_path / "here", False)]


# --- snapshot -----------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of the engine that was started; `ranks` is what its ranks return."""
    seen: dict[str, Any] = {"ranks": [TAKEN]}

    def offline_engine(**arguments: Any) -> Any:
        seen.update(arguments)
        if isinstance(seen["ranks"], Exception):
            raise seen["ranks"]
        return SimpleNamespace(
            collective_rpc=lambda method: seen["ranks"] if method == "lora_reload_take_snapshot" else 0
        )

    monkeypatch.setattr(seams, "offline_engine", offline_engine)
    return seen


def test_engine_arguments_are_those_of_vllm(started: dict[str, Any], tmp_path: Path) -> None:
    model = str(tmp_path)
    argv = ["--tensor-parallel-size", "2", model, "--quantization=fp8", "--max_model_len", "256"]
    assert cli.main(["snapshot", *argv, "--snapshot-dir", str(tmp_path), "--dtype", "bfloat16"]) == 0
    assert started["model"] == model and started["tensor_parallel_size"] == 2
    assert started["quantization"] == "fp8" and started["dtype"] == "bfloat16" and started["max_model_len"] == 256
    assert started["enable_lora"] is True and started["enable_sleep_mode"] is False
    assert started["additional_config"] == {"lora_reload": {"snapshot_dir": str(tmp_path)}}


def test_other_settings_stay(started: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_RELOAD_SNAPSHOT_DIR", str(tmp_path))
    config = {"lora_reload": {"snapshot": "never", "snapshot_dir": "elsewhere"}, "else": 1}
    assert cli.main(["snapshot", "/", "--additional-config", json.dumps(config)]) == 0
    assert started["additional_config"] == {
        "lora_reload": {"snapshot": "never", "snapshot_dir": str(tmp_path)},
        "else": 1,
    }


def test_settings_that_are_none(started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["snapshot", "/", "--snapshot-dir", "/s", "--additional-config", '{"lora_reload": 5}']) == 1
    assert "additional_config['lora_reload'] is 5, not a mapping" in capsys.readouterr().err
    assert "model" not in started


@pytest.mark.parametrize("argv", [["--snapshot-dir", "/s"], ["m", "--snapshot-dir", "/s", "--no-such-option"]])
def test_wrong_engine_arguments(argv: list[str], started: dict[str, Any]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["snapshot", *argv])
    assert end.value.code == 2 and "model" not in started


def test_a_model_that_is_not_there(started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM looks for it while it takes its arguments, if the hub is out of reach."""
    assert cli.main(["snapshot", "no/such-model", "--snapshot-dir", "/s"]) == 1
    assert "no snapshot was taken: " in capsys.readouterr().err and "model" not in started


def test_a_folder_is_needed(started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["snapshot", "model"]) == 2
    assert "--snapshot-dir" in capsys.readouterr().err and "model" not in started


@pytest.mark.parametrize(
    ("ranks", "status", "printed"),
    [
        ([TAKEN], 0, ["rank 0: /s/a.safetensors, 4 GB, written at 2.00 GB/s"]),
        ([TAKEN | {"seconds": None}], 0, ["rank 0: /s/a.safetensors, 4 GB, was there already"]),
        (
            [TAKEN, TAKEN | {"state": "none", "reason": "the disk is full"}],
            1,
            ["rank 0: /s/a.safetensors, 4 GB, written at 2.00 GB/s", "rank 1: NO SNAPSHOT: the disk is full"],
        ),
    ],
)
def test_every_rank_is_reported(
    ranks: Any, status: int, printed: list[str], started: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    started["ranks"] = ranks
    assert cli.main(["snapshot", "/", "--snapshot-dir", "/s"]) == status
    assert capsys.readouterr().out.splitlines() == printed


def test_an_engine_that_does_not_start(started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    started["ranks"] = ValueError("no such model")
    assert cli.main(["snapshot", "/", "--snapshot-dir", "/s"]) == 1
    assert "no snapshot was taken: ValueError: no such model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, None),  # all of them
        ("", "lora_reload"),
        ("other", "other,lora_reload"),
        ("lora_reload_x", "lora_reload_x,lora_reload"),
        ("lora_reload,other", "lora_reload,other"),
    ],
)
def test_the_plugin_is_selected(
    before: str | None, after: str | None, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS")
    if before is not None:
        monkeypatch.setenv("VLLM_PLUGINS", before)
    cli.main(["snapshot", "/", "--snapshot-dir", "/s"])
    assert os.environ.get("VLLM_PLUGINS") == after


# --- demo and bench -----------------------------------------------------------------------------------------------


def test_demo_and_bench_run_from_a_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "demo.py").write_text("import sys\nprint('demo', sys.argv[1:])\nsys.exit(3)")
    (folder / "all.py").write_text("import sys\nprint('all', sys.argv[1:])")
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    if sys.version_info < (3, 11):
        monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--help", "--family", "qwen3"]) == 3
    assert cli.main(["bench", "--quick"]) == 0
    assert capfd.readouterr().out == "demo ['--help', '--family', 'qwen3']\nall ['--quick']\n"


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_they_are_not_installed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.ROOT == ROOT and (ROOT / "benchmarks/demo.py").exists() and (ROOT / "benchmarks/all.py").exists()
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    assert cli.main([command]) == 2
    assert f"`{command}` comes with the source tree" in capsys.readouterr().err


# --- doctor: the installation -------------------------------------------------------------------------------------


def test_releases() -> None:
    status, text = only(doctor.releases())
    assert status == "ok"
    assert all(number in text for number in (__version__, sys.version.split()[0], torch.__version__, seams.release()))


def test_all_seams() -> None:
    assert only(doctor.all_seams())[0] == "ok"


@pytest.mark.parametrize(
    "missing",
    ["vllm.lora.utils._all_lora_classes", "vllm.v1.worker.worker_base.WorkerBase", "vllm.v1.engine.async_llm.AsyncLLM"],
)
def test_a_seam_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    doctor.seams.worker_class(), doctor.seams.engine_classes()
    monkeypatch.delattr(missing)
    status, text = only(doctor.all_seams())
    assert status == "problem" and f"{missing} is missing" in text and "Switch LoRA off" in text


@pytest.mark.parametrize(
    ("plugins", "status", "text"),
    [
        (None, "ok", "loads every plugin"),
        ("other,lora_reload", "ok", "selected by VLLM_PLUGINS=other,lora_reload"),
        ("", "problem", "set VLLM_PLUGINS=lora_reload"),
        ("one,two", "problem", "set VLLM_PLUGINS=one,two,lora_reload"),
        ("one, lora_reload", "problem", "set VLLM_PLUGINS=one,lora_reload"),  # vLLM does not strip
    ],
)
def test_plugin(plugins: str | None, status: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS")
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    found = only(doctor.plugin())
    assert found[0] == status and found[1].endswith(text) | (text in found[1] and status == "ok")


def test_plugin_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda **wanted: asked.append(wanted) or [])
    status, text = only(doctor.plugin())
    assert status == "problem" and "pip install" in text
    assert asked == [{"group": "vllm.general_plugins", "name": "lora_reload"}]


def test_plugin_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ImportError("half installed")

    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda **_: [SimpleNamespace(load=load)])
    (row,) = [row for row in doctor.examine(None, False) if row.name == "plugin"]
    assert row.status == "problem" and "ImportError: half installed" in row.detail


@pytest.mark.parametrize(
    ("environ", "rows"),
    [
        ({}, [("ok", "sets none")]),
        ({"RING_BYTES": "64M", "VERIFY": "full"}, [("ok", f"from the environment: ring_bytes={64 << 20}")]),
        ({"ON_MISSING": "ignore"}, [("problem", "on_missing .*'ignore', not one of .*; correct it")]),
        (
            {"SNAPSHOTDIR": "/s"},
            [("problem", "'LORA_RELOAD_SNAPSHOTDIR'; did you mean 'LORA_RELOAD_SNAPSHOT_DIR'.*; corr")],
        ),
    ],
)
def test_settings(environ: dict[str, str], rows: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(f"LORA_RELOAD_{name}", value)
    found = list(doctor.settings_of_environment())
    assert [row.status for row in found] == [status for status, _ in rows]
    for row, (_, text) in zip(found, rows, strict=True):
        assert re.search(text, row.detail), row


def test_lora_ranks() -> None:
    assert only(doctor.lora_ranks()) == (
        "ok",
        f"this vLLM accepts {', '.join(str(rank) for rank in seams.max_lora_ranks())}",
    )


# --- doctor: the GPUs ---------------------------------------------------------------------------------------------


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "no_sleep_mode", lambda: "there is none")
    for rows in (
        doctor.gpu([]),
        doctor.sleep_mode([]),
        doctor.digests_on_device([]),
        doctor.pinned_memory([], Settings()),
    ):
        status, text = only(rows)
        assert status == "warning" and text.startswith("no GPU")


def test_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000_000_000, 150_000_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    assert only(doctor.gpu([GPU])) == ("ok", "cuda:0: H200, 100.0 GB of 150.0 GB free")


@pytest.mark.parametrize(("reason", "status"), [(None, "ok"), ("it has none", "problem")])
def test_sleep_mode_on_a_gpu(reason: str | None, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "no_sleep_mode", lambda: reason)
    found = only(doctor.sleep_mode([GPU]))
    assert found[0] == status and (reason or "enable_sleep_mode") in found[1]


@pytest.mark.parametrize(
    ("available", "cuda", "cumem", "reason"),
    [
        (False, False, False, "none on the platform strange"),
        (True, True, True, None),
        (True, True, False, "cumem_allocator"),
        (True, False, False, None),  # has its own allocator
    ],
)
def test_where_vllm_has_sleep_mode(
    available: bool, cuda: bool, cumem: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = SimpleNamespace(
        is_sleep_mode_available=lambda: available, is_cuda_alike=lambda: cuda, device_name="strange"
    )
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", SimpleNamespace(cumem_available=cumem))
    found = seams.no_sleep_mode()
    assert found is None if reason is None else reason in str(found)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_MEASURED", 1 << 20)
    monkeypatch.setattr(doctor, "_SAMPLE", 1 << 18)


@pytest.mark.usefixtures("small")
def test_digests_are_compared_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real, timed = doctor.digests, []

    def digests(tensors: Any) -> list[int]:
        timed.append([tensor.numel() for tensor in tensors])
        return real(tensors)

    monkeypatch.setattr(doctor, "digests", digests)
    status, text = only(doctor.digests_on_device([CPU]))
    assert status == "ok" and "GB/s, and the same as on the CPU" in text
    assert timed[:2] == [[1 << 18, (1 << 18) - 1]] * 2 and timed[-1] == [1 << 20]
    calls = iter([[1, 2], [1, 3]])
    monkeypatch.setattr(doctor, "digests", lambda tensors: next(calls))
    status, text = only(doctor.digests_on_device([CPU]))
    assert status == "problem" and "computes others than the CPU" in text


@pytest.mark.usefixtures("small")
def test_digests_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """On something that says it is a GPU."""
    fake = SimpleNamespace(
        empty=lambda size, dtype, device: torch.empty(size, dtype=dtype),
        int64=torch.int64,
        uint8=torch.uint8,
        cuda=SimpleNamespace(mem_get_info=lambda device: (1 << 30, 1 << 30), synchronize=lambda device: None),
    )
    monkeypatch.setattr(doctor, "torch", fake)
    for triton, status in ((None, "warning"), (object(), "ok")):
        monkeypatch.setattr(doctor.checksum, "triton", triton)
        assert only(doctor.digests_on_device([GPU]))[0] == status


def test_digests_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda device: 1000)
    status, text = only(doctor.digests_on_device([CPU]))
    assert status == "warning" and "no memory free" in text


def test_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(ring_bytes=8 << 20, ring_threads=2, ring_chunk=1 << 20)
    status, text = only(doctor.pinned_memory([CPU], settings))
    assert status == "ok" and "4.2 MB can be taken" in text and "GB/s" in text

    closed: list[Ring] = []

    def prepare(self: Ring) -> None:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(Ring, "prepare", prepare)
    monkeypatch.setattr(Ring, "close", lambda self: closed.append(self))
    status, text = only(doctor.pinned_memory([CPU], settings))
    assert status == "problem" and "RuntimeError: out of memory" in text and "RING_BYTES" in text
    assert len(closed) == 1


# --- doctor: the folder of snapshots ------------------------------------------------------------------------------


def test_no_folder() -> None:
    assert only(doctor.snapshot_folder(None)) == ("ok", "none is set: after sleep(level=2) weights have to be loaded")


def test_folder(tmp_path: Path) -> None:
    status, text = only(doctor.snapshot_folder(tmp_path))
    assert status == "ok" and text.startswith(f"{tmp_path}: ") and " free, with" in text
    assert list(tmp_path.iterdir()) == []
    status, text = only(doctor.snapshot_folder(tmp_path / "a" / "b"))
    assert status == "warning" and "not there yet" in text
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (Path("/proc/none"), tmp_path / "file", tmp_path / "file" / "below"):
        status, text = only(doctor.snapshot_folder(folder))
        assert status == "problem" and "nothing can be written to" in text and "choose another one" in text


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
def test_folder_far_away(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "file_system", lambda folder: kind)
    status, text = only(doctor.snapshot_folder(tmp_path))
    assert status == "warning" and f"{kind}, " in text and "local disk" in text


def test_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def without(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no such thing")
        return real(path, flags, *args, **kwargs)

    def with_it(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        return real(path, flags & ~os.O_DIRECT, *args, **kwargs)

    for fake, text in ((without, "without direct"), (with_it, "with direct")):
        monkeypatch.setattr(os, "open", fake)
        assert text in only(doctor.snapshot_folder(tmp_path))[1]


def test_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    spaced = str(tmp_path / "a b").replace(" ", "\\040")
    mounts.write_text(
        "".join(
            f"dev {point} {kind} rw 0 0\n"
            for point, kind in (("/", "overlay"), (tmp_path, "xfs"), (tmp_path, "tmpfs"), (spaced, "nfs"), ("/x", "no"))
        )
    )
    (tmp_path / "link").symlink_to("/")
    for folder, kind in (("a b/c", "nfs"), ("a", "tmpfs"), ("link", "overlay")):
        assert doctor.file_system(tmp_path / folder, mounts) == kind


@pytest.fixture
def taken(tmp_path: Path) -> Snapshot:
    """A snapshot of this release with three tensors."""
    engine = Engine("org/model", seams.release(), "torch.bfloat16", None, {"tp": [0, 1], "pp": [0, 1]})
    tensors = {name: torch.randn(size) for name, size in (("embed", 3000), ("fused", 70), ("head", 2000))}
    found = storages(tensors.items(), CPU, set(), set())
    return write(engine.folder(tmp_path) / f"{engine.rank}.json", engine, found, digests_of(found))


def rows(folder: Path, verify: bool = True, device: torch.device = CPU) -> list[tuple[str, str]]:
    return [(row.status, row.detail) for row in doctor.snapshots(folder, Settings(ring_threads=1), device, verify)]


def overwrite(snapshot: Snapshot, *offsets: int) -> None:
    """Flip a bit at each, and hide it."""
    with snapshot.file.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 16]))
    os.utime(snapshot.file, ns=(0, snapshot.manifest.mtime_ns))


def test_no_snapshots(tmp_path: Path) -> None:
    assert rows(tmp_path) == rows(tmp_path / "none") == [("ok", "none has been written yet")]


@pytest.mark.parametrize("verify", [True, False])
def test_good_snapshot(taken: Snapshot, tmp_path: Path, verify: bool) -> None:
    ((status, text),) = rows(tmp_path, verify)
    what = f"{taken.path.parent.name}/tp0of1-pp0of1: org/model, vLLM {seams.release()}, bfloat16, not quantized, 0.0 MB"
    assert status == "ok" and text == f"{what}, {'every digest is right' if verify else 'not read (--verify does)'}"


def test_damage_is_found_by_reading(taken: Snapshot, tmp_path: Path) -> None:
    embed, fused, head = taken.manifest.entries
    overwrite(taken, embed.offset, head.offset + head.nbytes - 1)
    assert rows(tmp_path, verify=False)[0][0] == "ok"
    ((status, text),) = rows(tmp_path)
    assert status == "problem"
    assert text.endswith(f": damaged, 2 tensors (embed, head) have other bytes: delete {taken.file}")
    overwrite(taken, embed.offset, head.offset + head.nbytes - 1, fused.offset)
    assert "1 tensors (fused)" in rows(tmp_path)[0][1]


def test_reading_takes_bounded_memory(taken: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as the largest tensor, or a block. Where the GPU has no room the host takes it."""
    taking: list[int] = []
    real = Ring.read

    def read(self: Ring, wanted: Any) -> None:
        assert self.device == CPU
        taking.append(sum(piece.nbytes for pieces in wanted.values() for piece in pieces))
        real(self, wanted)

    monkeypatch.setattr(Ring, "read", read)
    monkeypatch.setattr(doctor, "_BLOCK", 9000)
    overwrite(taken, taken.manifest.entries[2].offset)
    monkeypatch.setattr(doctor, "free_memory", lambda device: 1000)
    ((status, text),) = rows(tmp_path, device=GPU)
    assert status == "problem" and "1 tensors (head)" in text
    assert taking == [12000, 8280]


def test_the_gpu_reads_if_it_has_room(taken: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda device: 1 << 40)
    chosen: list[torch.device] = []

    def ring(device: torch.device, settings: Settings) -> Ring:
        chosen.append(device)
        return Ring(CPU, threads=1)

    monkeypatch.setattr(doctor, "_ring", ring)
    assert rows(tmp_path, device=GPU)[0][0] == "ok" and chosen == [GPU]


def cut(snapshot: Snapshot) -> None:
    os.truncate(snapshot.file, 5000)


def touch(snapshot: Snapshot) -> None:
    os.utime(snapshot.file)


def remove(snapshot: Snapshot) -> None:
    snapshot.file.unlink()


def scribble(snapshot: Snapshot) -> None:
    snapshot.path.write_text("{")


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (cut, "has 5000 bytes instead of "),
        (touch, "was changed after it was written"),
        (remove, "is gone (No such file or directory)"),
        (scribble, "tp0of1-pp0of1.json cannot be read"),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_bad_snapshot(
    harm: Callable[[Snapshot], None], text: str, verify: bool, taken: Snapshot, tmp_path: Path
) -> None:
    harm(taken)
    ((status, found),) = rows(tmp_path, verify)
    assert status == "problem" and text in found and found.endswith("writes it anew")


def test_snapshot_that_cannot_be_read(taken: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Ring, wanted: Any) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(Ring, "read", read)
    ((status, text),) = rows(tmp_path)
    assert status == "problem" and "the disk is broken" in text and text.endswith(f"delete {taken.file}")


def test_snapshot_of_another_release(taken: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "release", lambda: "0.99")
    ((status, text),) = rows(tmp_path)
    assert status == "warning" and "engines of vLLM 0.99 will not use it" in text


def test_no_room_to_replace_a_snapshot(taken: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, status in ((taken.manifest.size - 1, "warning"), (taken.manifest.size, "ok")):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        assert only(doctor.snapshot_folder(tmp_path))[0] == status


def test_leftovers(taken: Snapshot, tmp_path: Path) -> None:
    assert only(doctor.leftovers(tmp_path)) == ("ok", "none")
    taken.path.with_name(".tp0of1-pp0of1.json.77.part").write_bytes(bytes(1_000_000))
    taken.path.with_name("tp0of1-pp0of1-0123.safetensors").write_bytes(bytes(1_000_000))
    status, text = only(doctor.leftovers(tmp_path))
    assert status == "warning" and "2 files of 2.0 MB" in text
    assert ".77.part" in text and "-0123.safetensors" in text and taken.file.name not in text


@pytest.mark.parametrize("harm", odd_files.KINDS)
@pytest.mark.parametrize("what", ["manifest", "file"])
@pytest.mark.parametrize("verify", [True, False])
def test_odd_snapshot(harm: Callable[[Path], None], what: str, verify: bool, taken: Snapshot, tmp_path: Path) -> None:
    """A row, soon."""
    place = taken.path if what == "manifest" else taken.file
    place.unlink()
    harm(place)
    ((status, text),) = in_time(lambda: rows(tmp_path, verify))
    assert status == "problem" and text.endswith("writes it anew")
    in_time(lambda: (list(doctor.leftovers(tmp_path)), list(doctor.snapshot_folder(tmp_path))))


def test_linked_folders_are_not_looked_into(taken: Snapshot, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    (folder / "model-0123").symlink_to(taken.path.parent)
    (taken.path.parent / "more.safetensors").touch()
    assert rows(folder) == [("ok", "none has been written yet")]
    assert only(doctor.leftovers(folder)) == ("ok", "none")


def test_a_leftover_link_to_nothing(taken: Snapshot, tmp_path: Path) -> None:
    odd_files.link(taken.path.with_name("more.safetensors"))
    status, text = only(doctor.leftovers(tmp_path))
    assert status == "warning" and "1 files" in text and "more.safetensors" in text


def test_snapshot_of_another_user(taken: Snapshot, tmp_path: Path) -> None:
    taken.file.chmod(0o666)
    ((status, text),) = rows(tmp_path, verify=True)
    assert status == "problem" and "other users may write to it" in text


# --- doctor: all of it --------------------------------------------------------------------------------------------


def test_examine(taken: Snapshot, tmp_path: Path) -> None:
    found = {row.name: row.status for row in doctor.examine(tmp_path, True)}
    assert list(found) == [
        "releases",
        "seams",
        "plugin",
        "settings",
        "max_lora_rank",
        "GPU",
        "sleep mode",
        "digests",
        "pinned memory",
        "snapshot folder",
        "snapshot",
        "leftovers",
    ]
    assert "problem" not in found.values()
    cut(taken)
    assert {row.name for row in doctor.examine(tmp_path, False) if row.status == "problem"} == {"snapshot"}
    assert "snapshot" not in {row.name for row in doctor.examine(None, True)}


def test_a_check_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks() -> list[int]:
        raise RuntimeError("who knows")

    monkeypatch.setattr(seams, "max_lora_ranks", ranks)
    monkeypatch.setenv("LORA_RELOAD_VERIFY", "perhaps")
    found = {row.name: row for row in doctor.examine(None, False)}
    assert found["max_lora_rank"].status == found["settings"].status == "problem"
    assert "RuntimeError: who knows" in found["max_lora_rank"].detail
    assert found["snapshot folder"].status == "ok"
