"""What benchmarks make of measurements, with made-up ones, and the parts of them that need neither GPU nor engine."""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import adapters, common, cycle, digest, overhead, scaling, shapes
from benchmarks import all as every
from benchmarks.common import Child, ChildError, Parent

MACHINE = {
    "gpu": "Some GPU", "gpus": 1, "cpus": 16, "memory": 128e9, "torch": "2", "engine": "vllm 1", "filesystem": "ext4"
}  # fmt: skip
TINY = shapes.Shape(layers=2, hidden=64, inner=128, heads=2, kv_heads=1, head_dim=32, vocab=512)


# --- Common ---------------------------------------------------------------------------------------------------


def test_the_deepest_mount_names_the_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nshm {tmp_path} tmpfs rw 0 0\nother {tmp_path}x xfs rw 0 0\n")
    assert common.filesystem(tmp_path / "not there yet", mounts) == "tmpfs"
    assert common.filesystem(Path("/elsewhere"), mounts) == "ext4"
    assert common.filesystem(tmp_path, tmp_path / "no mounts") == "unknown"


def test_the_machine_in_words(tmp_path: Path) -> None:
    found = common.machine(tmp_path)
    assert json.loads(json.dumps(found)) == found
    assert f"torch {torch.__version__}" in common.in_words(found)
    assert common.in_words(MACHINE).startswith("1 x Some GPU, 16 cores, 128 GB memory, files on ext4")


def test_a_table_is_aligned() -> None:
    assert common.table(["a", "long"], [["longer", "b"]]) == ("| a      | long |\n| ------ | ---- |\n| longer | b    |")


def test_the_middle_of_what_was_measured() -> None:
    assert common.middle([None, 3.0, 1.0, 2.0]) == "2.000"
    assert common.middle([0.0015], 1, 1e3) == "1.5"
    assert common.middle([None]) == common.middle([]) == "-"


def test_pairs_are_of_equal_numbers() -> None:
    ratio = common.paired("a / b", [2.0, 9.0, None, 8.0], [1.0, 3.0, 1.0])
    assert ratio["pairs"] == [(2.0, 1.0), (9.0, 3.0)]
    assert common.ratio_line(ratio) == "PAIRED RATIO a / b: 2.500 (median of 2 pairs, 2.000 to 3.000)"
    assert common.ratio_line(common.paired("a / b", [24.0], [2.0])) == "PAIRED RATIO a / b: 12.0 (1 pair)"
    assert common.ratio_line(common.paired("a / b", [1.0], [])) == "PAIRED RATIO a / b: not measured"


def test_files_are_written_beside_each_other(tmp_path: Path) -> None:
    common.save(tmp_path / "new" / "out-0.30.0", {"a": [1]}, "text")
    assert json.loads((tmp_path / "new" / "out-0.30.0.json").read_text()) == {"a": [1]}
    assert (tmp_path / "new" / "out-0.30.0.md").read_text() == "text\n"


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plots_are_drawn(tmp_path: Path) -> None:
    common.plot(tmp_path / "cycle", lambda _, panels: cycle.draw(variants(), panels[0]))
    common.plot(tmp_path / "sweep", lambda _, panels: adapters.draw_sweep(swept(), panels), panels=2)
    common.plot(tmp_path / "one", lambda _, panels: adapters.draw_one(one(), panels), panels=2)
    common.plot(tmp_path / "scaling", lambda _, panels: scaling.draw(scaled(), panels), panels=2)
    common.plot(tmp_path / "overhead", lambda _, panels: overhead.draw(served(), panels), panels=2)
    common.plot(tmp_path / "digest", lambda _, panels: digest.draw(digested(), panels))
    assert len(list(tmp_path.glob("*.png"))) == 6


def test_the_last_line_fits_into_a_table() -> None:
    assert common.last_line("first\n  a | b \n\n") == "a / b"
    assert common.last_line("") == "no output"


def test_an_error_fits_into_a_table() -> None:
    assert common.one_line(ValueError("first\n  a | b")) == "ValueError: first a / b"
    assert len(common.one_line(ValueError("x" * 1000))) == 240


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_a_digest_sees_every_change(dtype: torch.dtype) -> None:
    tensor = torch.arange(30).to(dtype).view(5, 6)
    before = common.digest(tensor)
    assert common.digest(tensor.clone()) == before
    changed = tensor.clone()
    changed[4, 5] += 1
    swapped = tensor[[1, 0, 2, 3, 4]]
    assert len({before, common.digest(changed), common.digest(swapped), common.digest(tensor[:4])}) == 4
    assert common.digest(tensor.t()) == common.digest(tensor.t().contiguous())


def test_digests_leave_out_empty_tensors() -> None:
    found = common.digests(iter({"a": torch.ones(()), "b": torch.ones(0), "c": torch.ones(3)[1:]}.items()))
    assert list(found) == ["a", "c"]


def test_digests_of_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_WORDS", 4)
    monkeypatch.setattr(common, "_factors", {})
    tensor = torch.arange(10, dtype=torch.int32)
    swapped = tensor[[4, 5, 6, 7, 0, 1, 2, 3, 8, 9]]
    assert common.digest(tensor) != common.digest(swapped)


def test_host_memory_is_in_bytes() -> None:
    assert common.host_memory("Name:\tx\nVmHWM:\t  12 kB\nRssFile:\t 1 kB\nOdd\n") == {"VmHWM": 12288, "RssFile": 1024}
    assert common.host_memory()["VmRSS"] > 1 << 20


def test_the_sampler_sees_a_peak() -> None:
    before = common.host_memory()["VmRSS"]
    sampler = common.MemorySampler()
    block = bytearray(os.urandom(1 << 20) * 64)
    time.sleep(0.2)
    del block
    assert sampler.stop()["VmRSS"] - before > 32 << 20


def child(config: Any, parent: Parent) -> None:
    print("it says this")
    parent.tell({"plugins": os.environ["SOME_VARIABLE"]})
    if config == "die at once" and parent._connection.poll(60):  # what it is told stays unread
        os._exit(4)
    parent.wait()
    if config == "fail":
        raise ValueError("first line\nlast line")
    if config == "die":
        os._exit(3)
    if config == "hang":
        time.sleep(60)
    parent.tell(config)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"n": 1}, None),
        ("fail", "ValueError: first line last line"),
        ("die", "exit status 3: "),
        ("die at once", "exit status 4: "),
        ("hang", "no answer for 1 s; last output: it says this"),
    ],
)
def test_a_child_tells_what_it_found(config: Any, problem: str | None, tmp_path: Path) -> None:
    process = Child(child, config, {"SOME_VARIABLE": "x"}, tmp_path / "log")
    assert "SOME_VARIABLE" not in os.environ
    try:
        assert process.receive(60) == {"plugins": "x"}
        process.go()
        if problem is None:
            assert process.receive(60) == config
        else:
            with pytest.raises(ChildError, match=problem):
                process.receive(1 if config == "hang" else 60)
    finally:
        process.close()


# --- Shapes ---------------------------------------------------------------------------------------------------


def test_the_default_shape_is_that_of_an_8b_model() -> None:
    assert 16.3e9 < shapes.Shape().nbytes < 16.5e9
    assert 174e6 < shapes.Shape().adapter_bytes(32) < 176e6


def test_tensors_of_an_adapter_have_the_size_that_is_told() -> None:
    tensors = shapes.adapter_tensors(TINY, 4, 0, "cpu")
    assert sum(tensor.nbytes for tensor in tensors.values()) == TINY.adapter_bytes(4)


def test_shards_are_no_larger_than_asked() -> None:
    files = shapes.shards({"a": (2, 4), "b": (2, 4), "c": (40,), "d": (1,)}, limit=32)
    assert files == [["a", "b"], ["c"], ["d"]]


def test_a_checkpoint_is_what_transformers_expects(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    folder = shapes.make_checkpoint(tmp_path / "model", TINY, "cpu", limit=100_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(TINY.parameters())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    assert {file.name for file in files} == set(index["weight_map"].values())
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert sum(p.numel() * 2 for p in model.parameters()) == TINY.nbytes


def test_a_checkpoint_is_made_once(tmp_path: Path) -> None:
    folder = shapes.make_checkpoint(tmp_path / "model", TINY, "cpu")
    (folder / "mine").touch()
    shapes.make_checkpoint(folder, TINY, "cpu")
    assert (folder / "mine").exists()
    shapes.make_checkpoint(folder, shapes.Shape(**{**vars(TINY), "layers": 1}), "cpu")
    assert not (folder / "mine").exists()


def test_an_adapter_is_made_once(tmp_path: Path) -> None:
    file = shapes.make_adapter(tmp_path / "a", TINY, 4, 1, "cpu") / "adapter_model.safetensors"
    before = file.stat().st_mtime_ns
    shapes.make_adapter(tmp_path / "a", TINY, 4, 2, "cpu")
    assert file.stat().st_mtime_ns == before


def test_the_layout_of_a_file(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "a": torch.ones(5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "file", {"format": "pt"})
    content = (tmp_path / "file").read_bytes()
    found = {}
    for name, dtype, shape, offset in shapes.layout(tmp_path / "file"):
        raw = bytearray(content[offset : offset + 2 * torch.Size(shape).numel()])
        found[name] = torch.frombuffer(raw, dtype=dtype).view(shape)
    assert set(found) == {"a", "b"}
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


# --- Cycle ----------------------------------------------------------------------------------------------------


def made_up(sleep: float, wake: float, reload: float | None, total: float, exact: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sleep": sleep,
        "wake weights": wake,
        "wake kv_cache": 0.01,
        "tokens": {"adapter 1": 0.1, "base": 0.2, "adapter 2": 0.3, "adapter 3": 0.5},
        "total": total,
        "exact": exact,
        "slots": exact,
        "same": {"adapter 1": True, "base": exact},
    }
    return found | ({} if reload is None else {"reload": reload})


def variants() -> dict[str, Any]:
    start = {"start": 50.0, "first tokens": {"adapter 1": 2.0, "base": 1.0}, "lora": True, "snapshot": None}
    memory = {
        "before": {"VmRSS": 1_000_000_000},
        "peak": {"VmRSS": 3_000_000_000, "VmHWM": 4_000_000_000, "RssAnon": 500_000_000},
        "torch pinned": 2_000_000_000,
        "ring": 500_000_000,
    }
    of_level1 = [made_up(14.0, 0.6, None, 15.0), *[made_up(0.4, 0.5, None, 1.5)] * 2]
    of_stock = [made_up(0.1, 0.05, 3.0, 3.5), *[made_up(0.05, 0.05, 2.0, 2.5)] * 2]
    of_snapshot = [made_up(0.1, 0.9, None, 1.5), made_up(0.05, 0.5, None, 0.75), made_up(0.05, 0.4, None, 0.5, False)]
    restored = [
        each | {"restore": {"source": "snapshot", "bytes": 16_000_000_000, "seconds": 0.4}} for each in of_snapshot
    ]
    snapshot = {"state": "valid", "bytes": 16_400_000_000, "seconds": 9.5}
    return {
        "level1": {"cycles": of_level1, "error": None, "memory": memory, "started alone": True} | start,
        "level2_stock": {"cycles": of_stock, "error": None, "memory": memory} | start | {"lora": False},
        "level2": {"cycles": [], "error": "ValueError: no", "started alone": True},
        "level2_snapshot": {"cycles": restored, "error": None, "started alone": False} | start | {"snapshot": snapshot},
    }


def cycles_measured(found: dict[str, Any]) -> dict[str, Any]:
    config = {
        "layers": 36, "checkpoint_bytes": 16.4e9, "adapters": 4, "adapter_bytes": 175e6, "rank": 32, "cycles": 2
    }  # fmt: skip
    return {"machine": MACHINE, "config": config, "variants": found}


def test_the_first_cycle_stands_on_its_own() -> None:
    row = cycle.time_row("level1", variants()["level1"])
    assert row == ["level1", "14.000", "15.000", "0.400", "0.500", "-", "0.010", "0.100", "0.200", "0.400", "1.500"]


def test_other_bytes_are_a_failure() -> None:
    """Also of the whole run."""
    assert cycle.wrong(variants()) == ["level2", "level2_snapshot"]
    measured = scaled()
    assert scaling.wrong(measured) == ["4 GB direct", "4 GB direct"]
    measured["peers"][scaling.OURS]["exact"][1] = False
    assert scaling.wrong(measured)[2:] == [scaling.OURS]
    assert scaling.wrong({"cases": measured["cases"][:1]}) == []


@pytest.mark.parametrize(("exact", "status"), [(True, None), (False, "level1")])
def test_how_a_cycle_ends(exact: bool, status: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"variants": {"level1": {"error": None, "cycles": [{"exact": exact}]}}}
    monkeypatch.setattr(cycle, "measure", lambda *args: found)
    monkeypatch.setattr(common, "need_gpu", lambda: None)
    monkeypatch.setattr(sys, "argv", ["cycle"])
    with pytest.raises(SystemExit, match=status) if status else contextlib.nullcontext():
        cycle.main()


@pytest.mark.parametrize(("exact", "status"), [(True, None), (False, "4 GB buffered")])
def test_how_scaling_ends(exact: bool, status: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scaled() | {"cases": [scaled()["cases"][0] | {"exact": exact}]}
    monkeypatch.setattr(scaling, "measure", lambda *args: found)
    monkeypatch.setattr(common, "need_gpu", lambda: None)
    monkeypatch.setattr(sys, "argv", ["scaling", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=status) if status else contextlib.nullcontext():
        scaling.main()


def test_a_variant_without_lora_says_so() -> None:
    assert cycle.time_row("level2_stock", variants()["level2_stock"])[0] == "level2_stock (LoRA off, no adapters)"


def test_a_row_says_what_was_right_and_how_much_memory_it_took() -> None:
    assert cycle.right_row("level1", variants()["level1"]) == [
        "level1", "3 of 3", "3 of 3", "6 of 6", "-", "-", "-", "2.50", "2.00", "0.50/-/-", "4.00", ""
    ]  # fmt: skip
    restored = ["2 of 3", "2 of 3", "5 of 6", "snapshot", "0.400", "40.0"]
    assert cycle.right_row("level2_snapshot", variants()["level2_snapshot"])[1:7] == restored
    without_lora = variants()["level2_stock"]
    without_lora["cycles"] = [each | {"slots": None} for each in without_lora["cycles"]]
    assert cycle.right_row("level2_stock", without_lora)[2] == "-"
    assert cycle.right_row("level2", variants()["level2"])[-1] == "ValueError: no"


def test_ratios_are_of_the_same_cycle() -> None:
    ratios = {each["label"]: each for each in cycle.ratios(variants())}
    assert ratios["level2_stock reload / restore of level2_snapshot"]["pairs"] == [(2.0, 0.4), (2.0, 0.4)]
    assert ratios["level2_stock reload / level2_snapshot wake weights"]["pairs"] == [(2.0, 0.5), (2.0, 0.4)]
    assert ratios["level1 total / level2_snapshot total"]["median"] == 2.5
    assert ratios["level1 first sleep / level2_snapshot first sleep"]["pairs"] == [(14.0, 0.1)]
    assert ratios["level2_stock reload / level2_replay reload"]["median"] is None
    assert ratios["restart / level2_snapshot total"]["pairs"] == [(52.0, 0.75), (52.0, 0.5)]


def test_slots_are_all_that_adapters_are_brought_into() -> None:
    class Layer(torch.nn.Linear):
        lora_a_stacked = (torch.ones(1), torch.ones(2))
        lora_b_stacked = (torch.ones(3),)

    model = torch.nn.Sequential(torch.nn.Linear(1, 1), Layer(1, 1))
    found = {name: tensor.numel() for name, tensor in cycle.slots(model)}
    assert found == {"1.lora_a_stacked.0": 1, "1.lora_a_stacked.1": 2, "1.lora_b_stacked.0": 3}


def test_a_restart_is_of_an_engine_that_started_alone() -> None:
    assert cycle.restart_row(variants())[:2] == ["restart (of level1)", "-"]
    assert cycle.restart_row(variants())[-1] == "52.000"
    assert len(cycle.restart_row({})) == len(cycle.restart_row(variants()))


@pytest.mark.parametrize("without", [[], ["level1"], list(variants())])
def test_a_summary_of_whatever_was_measured(without: list[str]) -> None:
    found = {name: variant for name, variant in variants().items() if name not in without}
    text = cycle.render(cycles_measured(found))
    assert "16.4 GB, 4 adapters of rank 32" in text
    assert text.splitlines()[-1].startswith("PAIRED RATIO")
    assert ("written in 9.5 s" in text) == ("level2_snapshot" in found)


def test_stacked_bars_end_at_the_total() -> None:
    axes = MagicMock()
    cycle.draw(variants(), axes)
    heights = [call.args[1] for call in axes.text.call_args_list]
    assert heights == pytest.approx(
        [0.4 + 0.5 + 0.01 + 0.1, 0.05 + 0.05 + 2.0 + 0.01 + 0.1, 0, 0.05 + 0.45 + 0.01 + 0.1]
    )


def test_engines_start_side_by_side_but_for_the_last() -> None:
    names = list(cycle.VARIANTS)
    assert cycle.batches(names, together=False) == [[name] for name in names]
    first, last = cycle.batches(names, together=True)
    assert last == ["level2_replay"]
    assert sorted(first + last) == sorted(names)
    assert cycle.batches(["a", "b", "c"], together=True) == [["a", "b"], ["c"]]


class FakeEngine:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))

    def collective_rpc(self, method: str) -> None:
        self.calls.append(method)


@pytest.mark.parametrize(("name", "level", "reloads"), [("level1", 1, 0), ("level2", 2, 1), ("level2_snapshot", 2, 0)])
def test_a_cycle_takes_its_steps_in_order(name: str, level: int, reloads: int) -> None:
    llm = FakeEngine()
    asked: list[str] = []

    def question(who: str) -> int:
        asked.append(who)
        return 7

    ask = {who: functools.partial(question, who) for who in ("adapter 1", "base")}
    measured, answers = cycle.run_cycle(llm, cycle.VARIANTS[name], ask)
    reload = ["reload_weights"] * reloads
    assert llm.calls == [("sleep", level), ("wake_up", "weights"), *reload, ("wake_up", "kv_cache")]
    assert asked == ["adapter 1", "base"]
    assert answers == {"adapter 1": 7, "base": 7}
    assert measured["total"] >= sum(measured.get(step, 0) for step in cycle.STEPS)


@pytest.mark.parametrize("name", list(cycle.VARIANTS))
def test_arguments_of_an_engine(name: str) -> None:
    config = {
        "checkpoint": "c", "adapters": ["a", "b"], "rank": 8, "kv_bytes": 1, "snapshot_dir": "d", "engine": {"seed": 1}
    }  # fmt: skip
    arguments = cycle.engine_arguments(config, cycle.VARIANTS[name], lora=name != "level2_stock")
    assert ("enable_lora" in arguments) == (name != "level2_stock")
    assert arguments["seed"] == 1
    settings = arguments.get("additional_config", {}).get("lora_reload")
    expected = {
        "level2": {"replay": "off"},
        "level2_replay": {"replay": "on"},
        "level2_snapshot": {"snapshot_dir": "d"},
    }
    assert settings == expected.get(name)


# --- Scaling --------------------------------------------------------------------------------------------------


def scaled() -> dict[str, Any]:
    warm = {"series": "size", "gigabytes": 4.0, "threads": 0, "reader": "buffered", "warm": True}
    cold = warm | {"reader": "direct", "warm": False, "series": "threads", "threads": 8}
    return {
        "machine": MACHINE,
        "bus": [50.0, 40.0, 60.0],
        "write": {"buffered": 1.5, "O_DIRECT": None},
        "cases": [
            warm
            | {"seconds": [0.1, 0.2, 0.4], "alone": [0.05] * 3, "cached": [1.0], "exact": True}
            | {"threads used": 16},
            cold | {"seconds": [2.0], "cached": [None], "exact": False},
            cold | {"seconds": [], "error": "OSError: no"},
        ],
        "left out": ["32 GB: no room"],
        "peer bytes": 4e9,
        "peers": {
            scaling.OURS: {"version": "1", "seconds": [9.0, 0.1, 0.2], "exact": [True] * 3, "error": None},
            "other": {"version": "2", "seconds": [9.0, 0.4, 0.4], "exact": [True, False, True], "error": None},
            "absent": {"version": "", "seconds": [], "exact": [], "error": "not installed"},
        },
    }


def test_cases_vary_one_thing_at_a_time() -> None:
    found = scaling.cases([1, 4, 16], 4, 16)
    assert len(found) == len(set(found))
    assert {case.threads for case in found if case.series == "size"} == {0}
    assert [case.threads for case in found if case.series == "threads" and case.warm] == [1, 2, 4, 8, 16]
    assert 32 in {case.threads for case in scaling.cases([1], 1, 64)}
    assert max(case.gigabytes for case in found if not case.warm) == 4
    warm = [case.warm for case in found]
    assert warm == sorted(warm, reverse=True), "cold ones are left out first"


def test_rows_of_scaling() -> None:
    first, second, third = (scaling.case_row(case, 50.0) for case in scaled()["cases"])
    assert first == ["4", "buffered", "warm", "16", "20.0", "40.0", "40%", "80.0", "100%", "yes"]
    assert second == ["4", "direct", "cold", "8", "2.0", "2.0", "4%", "-", "unknown", "NO"]
    assert third[4:] == ["-", "-", "-", "-", "unknown", "OSError: no"]


def test_other_loaders_are_counted_from_their_second_round() -> None:
    text = scaling.render(scaled())
    assert "bus, pinned memory to device: 50.0 GB/s" in text
    assert "disk, write O_DIRECT: not possible" in text
    assert "Left out: 32 GB: no room" in text
    ours, other, absent = scaling.ratios(scaled())[0], *scaling.ratios(scaled())[:2]
    assert ours == other
    assert other["pairs"] == [(0.4, 0.1), (0.4, 0.2)]
    assert absent["pairs"] == []
    row = scaling.peer_row("absent", scaled()["peers"]["absent"], 4, 50)
    assert row == ["absent", "-", "-", "-", "-", "-", "not installed"]
    assert scaling.peer_row("other", scaled()["peers"]["other"], 4, 50)[-1] == "NO"
    assert scaling.render({"machine": MACHINE, "cases": []}).endswith("not measured")


@pytest.mark.parametrize("nbytes", [1, 4096, (16 << 20) + 5, (130 << 20) + 1])
@pytest.mark.parametrize("direct", [False, True])
def test_numbered_blocks_are_written_and_recognized(nbytes: int, direct: bool, tmp_path: Path) -> None:
    with mmap.mmap(-1, scaling.BLOCK) as memory:
        memory[: 1 << 20] = os.urandom(1 << 20)
        block = torch.frombuffer(bytearray(memory), dtype=torch.uint8)
        rate = scaling.write(tmp_path / "file", nbytes, memory, direct)
    if rate is None:
        pytest.skip("no direct access here")
    assert rate > 0
    (tmp_path / "file").read_bytes()
    assert scaling.cached(tmp_path / "file", nbytes) == 1
    content = torch.frombuffer(bytearray((tmp_path / "file").read_bytes()), dtype=torch.uint8)[:nbytes]
    if nbytes < 8:
        return
    assert scaling.is_right(content, block)
    content[-1] ^= 1
    assert not scaling.is_right(content, block)


@pytest.mark.parametrize(("reader", "warm"), [("buffered", True), ("buffered", False), ("direct", False)])
def test_a_case_is_read_and_compared(reader: str, warm: bool, tmp_path: Path) -> None:
    pytest.importorskip("vllm_lora_reload.ring")
    nbytes = 150_000_000
    with mmap.mmap(-1, scaling.BLOCK) as memory:
        memory[: 1 << 20] = os.urandom(1 << 20)
        block = torch.frombuffer(bytearray(memory), dtype=torch.uint8)
        scaling.write(tmp_path / "file", nbytes, memory, False)
    case = scaling.Case("size", 0.15, 2, reader, warm)
    found = scaling.run_case(case, tmp_path / "file", torch.empty(nbytes + 10, dtype=torch.uint8), block, 2)
    assert found["exact"]
    assert found["threads used"] == 2
    assert len(found["seconds"]) == len(found["cached"]) == 2
    assert len(found["alone"]) == (2 if warm else 0)


def test_cases_run_in_a_process_for_each_number_of_threads(tmp_path: Path) -> None:
    nbytes, file = 80_000_000, tmp_path / "file"
    with mmap.mmap(-1, scaling.BLOCK) as memory:
        memory[: 1 << 20] = os.urandom(1 << 20)
        scaling.write(file, nbytes, memory, False)
    case = scaling.Case("threads", 0.08, 1, "buffered", True)
    todo = [case, dataclasses.replace(case, threads=2), dataclasses.replace(case, gigabytes=0.01)]
    runner = scaling.Cases(todo, file, 1, torch.device("cpu"))
    try:
        found = [runner.run(case) for case in todo]
        assert [each["threads used"] for each in found] == [1, 2, 1]
        assert all(each["exact"] and len(each["seconds"]) == 1 for each in found)
        with file.open("r+b") as content:
            content.seek(70_000_000)
            content.write(b"x")
        assert not runner.run(todo[1])["exact"]
        file.unlink()
        assert "No such file" in runner.run(case)["error"]
        assert "No such file" in runner.run(case)["error"], "its process is gone"
    finally:
        runner.close()


def test_reads_alone_take_all_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    buffers = torch.zeros(3, 40, dtype=torch.uint8)
    scaling.reads_alone(tmp_path / "file", 100, buffers)  # type: ignore[arg-type]
    assert bytes(buffers.flatten().tolist()) == bytes(range(100)) + bytes(20)


def test_loaders_on_the_cpu_agree(tmp_path: Path) -> None:
    pytest.importorskip("vllm_lora_reload.ring")
    file = tmp_path / "file.safetensors"
    tensors = {"b": torch.randn(300, 5).bfloat16(), "a": torch.randn(7).bfloat16()}
    save_file(tensors, file)
    for load in (scaling.load_ring, scaling.load_safetensors):
        with load(file, "cpu") as found:
            assert common.digests(iter(found.items())) == common.digests(iter(tensors.items()))


# --- Adapters -------------------------------------------------------------------------------------------------


def one() -> dict[str, Any]:
    return {
        "machine": MACHINE,
        "config": {"layers": 36, "adapters": 4, "rank": 32},
        "megabytes": 175.0,
        "seconds": {adapters.PACKAGE: [0.005, 0.005], adapters.LOOP: [0.015, 0.02], adapters.DROP: [0.1, 0.1]},
        "to first token": {adapters.UPDATE: [0.1, 0.2], adapters.SAVE: [0.4, 0.4]},
        "reserved": 0,
    }


def swept() -> dict[str, Any]:
    def entry(rank: int, count: int, package: float) -> dict[str, Any]:
        seconds = {adapters.PACKAGE: [package * count] * 2, adapters.LOOP: [package * 3 * count] * 2}
        return {"rank": rank, "count": count, "bytes": 10_000_000 * rank, **seconds}

    return {
        "machine": MACHINE,
        "config": {"layers": 8, "gigabytes": 5, "rounds": 2},
        "sweep": [entry(8, 1, 0.004), entry(8, 2, 0.002), entry(32, 1, 0.01)],
        "left out": ["rank 32, [2] adapters: more than 5 GB"],
    }


def test_the_table_of_one_engine() -> None:
    text = adapters.render_one(one())
    assert "| this package               | 5.0            | 35.0 |" in text
    assert f"PAIRED RATIO {adapters.LOOP} / {adapters.PACKAGE}: 3.500 (median of 2 pairs, 3.000 to 4.000)" in text
    assert text.splitlines()[-1].startswith(f"PAIRED RATIO {adapters.SAVE} / {adapters.UPDATE}: 3.000")


def test_the_table_of_a_sweep() -> None:
    assert adapters.sweep_row(swept()["sweep"][1]) == ["8", "2", "80", "4.0", "2.00", "40.0", "6.00"]
    text = adapters.render_sweep(swept())
    assert "Left out: rank 32, [2] adapters: more than 5 GB" in text
    assert [line[: line.index(":")] for line in text.splitlines() if line.startswith("PAIRED")] == [
        f"PAIRED RATIO {adapters.LOOP} / {adapters.PACKAGE}, {what}" for what in ("rank 8", "rank 32", "all")
    ]
    assert adapters.render_sweep(swept() | {"sweep": []}).endswith("not measured")


def test_only_what_fits_is_swept() -> None:
    assert adapters.fitting([4, 1, 16], 1000, 4000) == [1, 4]
    assert adapters.fitting([1], 1000, 10) == []


def test_slots_are_put_back_once_more_before_this_package_is_timed() -> None:
    bench: Any = adapters.Bench.__new__(adapters.Bench)
    done: list[str] = []

    def way(name: str, seconds: float) -> float:
        done.append(name)
        return seconds

    bench.package = functools.partial(way, "package", 1.0)
    ways = {adapters.PACKAGE: bench.package, adapters.LOOP: functools.partial(way, "loop", 2.0)}
    measured = bench.measure(ways, 2)
    assert done == ["package", *["package", "package", "loop"] * 2]
    assert measured == {adapters.PACKAGE: [1.0, 1.0], adapters.LOOP: [2.0, 2.0]}


# --- Overhead -------------------------------------------------------------------------------------------------


def served() -> dict[str, Any]:
    step = {"none": {"wall": [0.001, 0.002, 0.003], "cpu": [0.001]}, "lora_reload": {"wall": [0.003], "cpu": [0.001]}}
    pairs = [(100.0, 99.0), (100.0, 101.0)]
    return {"machine": MACHINE, "config": {}, "starts": [pairs], "pairs": pairs, "steps": [step, step]}


def test_overhead_is_with_over_without() -> None:
    text = overhead.render(served())
    assert "| without | 100      | 2.000          | 1.000         |" in text
    assert "PAIRED RATIO tokens per second, with / without: 1.000 (median of 2 pairs, 0.990 to 1.010)" in text
    assert "PAIRED RATIO wall time of a decode step, with / without: 1.500" in text
    assert "PAIRED RATIO CPU time of a decode step, with / without: 1.000" in text
    assert overhead.render(served() | {"steps": []}).endswith("not measured")


def test_steps_are_timed_while_all_requests_decode() -> None:
    sampling = MagicMock(max_tokens=12)
    engine = MagicMock()
    engine.has_unfinished_requests.side_effect = [True, True, False]
    seconds = overhead.decode_steps(engine, [("a", None), ("b", "lora")], sampling)
    assert engine.add_request.call_count == 2
    assert len(seconds["wall"]) == len(seconds["cpu"]) == 12 - 2 * overhead.WARM_STEPS
    assert engine.step.call_count == overhead.WARM_STEPS + 4 + 2


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been done, with ``turn`` where it was waited for."""
    done: list[str] = []
    monkeypatch.setattr(common, "wait_for_turn", lambda wait: done.append("turn" if wait else "no wait"))
    return done


def test_overhead_waits_for_its_turn(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """When engines have started and warmed up."""

    class Served:
        def __init__(self, config: dict[str, Any], plugins: str) -> None:
            done.append("start")

        def round(self) -> float:
            done.append("round")
            return 1.0

        def steps(self) -> dict[str, list[float]]:
            done.append("steps")
            return {"wall": [1.0], "cpu": [1.0]}

        def close(self) -> None:
            done.append("close")

    monkeypatch.setattr(overhead, "Served", Served)
    overhead.measure({}, 1, 0, overhead.KINDS, wait=True)
    warm = ["round", "round", "steps"]
    assert done == ["start", "start", *warm, *warm, "turn", "round", "round", "close", "close"]


def test_the_cycle_waits_for_its_turn(done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the engines that start side by side have; the last one starts later."""

    class Run:
        def __init__(self, name: str, config: dict[str, Any], logs: Path) -> None:
            self.name = name
            self.measured: dict[str, Any] = {"cycles": [], "error": None}

        def started(self, alone: bool) -> None:
            done.append(f"started {self.name}")

        def cycle(self, count: int) -> None:
            done.append(f"measured {self.name}")

        def close(self) -> None:
            pass

    monkeypatch.setattr(cycle, "Run", Run)
    monkeypatch.setattr(cycle, "Child", MagicMock())
    monkeypatch.setattr(common, "plot", lambda *args: None)
    names = ["level1", "level2_stock", "level2_replay"]
    args = argparse.Namespace(
        layers=2, cycles=1, adapters=1, rank=8, kv_gigabytes=1, variants=names, together=True, wait=True,
        out=tmp_path / "out",
    )  # fmt: skip
    cycle.measure(args, tmp_path, tmp_path)
    assert done == [
        "started level1", "started level2_stock", "turn", "measured level1", "measured level2_stock",
        "started level2_replay", "no wait", "measured level2_replay",
    ]  # fmt: skip


def test_adapters_wait_for_their_turn(done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = MagicMock(device="cpu")
    bench.measure.side_effect = lambda ways, rounds: done.append("measured") or {name: [1.0] for name in ways}
    bench.package.side_effect = lambda: done.append("back")
    monkeypatch.setattr(adapters, "Bench", lambda *args, **more: bench)
    monkeypatch.setattr(adapters, "make_adapter", lambda *args: tmp_path)
    args = argparse.Namespace(layers=2, adapters=1, rank=8, rounds=1, wait=True)
    adapters.measure_one(args, tmp_path, TINY)
    assert done == ["back", "turn", "measured"]


# --- Digests --------------------------------------------------------------------------------------------------


def digested() -> dict[str, Any]:
    run = {"digests": {"device": 4.0, "wall": 5.0}, "sum": {"device": 3.0, "wall": 3.0}}
    slow = {"digests": {"device": 6.0, "wall": 7.0}, "sum": {"device": 3.0, "wall": 3.0}}
    return {"machine": MACHINE, "bytes": 12_000_000_000, "tensors": 7, "runs": [run, slow, run]}


def test_digests_beside_the_sum_of_the_same_memory() -> None:
    text = digest.render(digested())
    assert "7 tensors, 12.00 GB, medians of 3 runs" in text
    assert "| digests | device | 4.00 | 3.000 |" in text
    assert "| sum     | wall   | 3.00 | 4.000 |" in text
    assert "PAIRED RATIO sum / digests, ms of the device clock: 0.750 (median of 3 pairs, 0.500 to 0.750)" in text


def test_digests_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["digest", "--gigabytes", "0.01", "--runs", "2", "--out", str(tmp_path / "d")])
    digest.main()
    measured = json.loads((tmp_path / "d.json").read_text())
    assert [list(run) for run in measured["runs"]] == [["digests", "sum"], ["sum", "digests"]]
    assert measured["tensors"] == len(digest.shapes())
    assert capsys.readouterr().out == (tmp_path / "d.md").read_text()


# --- All ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_every_part_exists(quick: bool, tmp_path: Path) -> None:
    found = every.parts(36, quick, str(tmp_path))
    assert len({part.name for part in found}) == len(found)
    for part in found:
        assert (every.ROOT / f"{part.module.replace('.', '/')}.py").exists()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return lambda code: (tmp_path / "made_up_part.py").write_text(code)


def run(part: every.Part, out: Path, seconds: float) -> str | None:
    return every.Run(part, out, seconds).go(seconds)


def test_a_part_that_fails_is_reported(module: Any, tmp_path: Path) -> None:
    module("import sys\nprint('table')\nprint(sys.argv)\nraise ValueError('why')")
    problem = run(every.Part("a", "made_up_part", 60, ["--x"]), tmp_path / "out", 60)
    assert problem == "exit status 1: ValueError: why"
    assert f"['{tmp_path / 'made_up_part.py'}', '--x', '--out', '{tmp_path / 'out'}']" in every.shown(tmp_path / "out")


def test_a_part_is_told_when_to_begin_nothing_new(module: Any, tmp_path: Path) -> None:
    module("import sys\nprint(sys.argv[3:])")
    part = every.Part("a", "made_up_part", 60, told="--seconds")
    assert run(part, tmp_path / "out", 100) is None
    assert "['--seconds', '60']" in every.shown(tmp_path / "out")


def test_a_part_that_takes_too_long_is_stopped(module: Any, tmp_path: Path) -> None:
    module("import time, pathlib, sys\npathlib.Path(sys.argv[2] + '.md').write_text('so far')\ntime.sleep(60)")
    assert run(every.Part("a", "made_up_part", 60), tmp_path / "out", 3) == "stopped after 3 s"
    assert every.shown(tmp_path / "out") == "so far"


def test_a_part_that_works(module: Any, tmp_path: Path) -> None:
    module("print('done')")
    assert run(every.Part("a", "made_up_part", 60), tmp_path / "out", 60) is None
    assert every.shown(tmp_path / "out") == "done"
    text = every.summary("machine", [("a", "3 s", "table"), ("b", "Left out", "")])
    assert text == "# Benchmarks\n\nmachine\n\n## a\n\n3 s\n\ntable\n\n## b\n\nLeft out\n"


WAITS = "import sys\nfrom benchmarks import common\nprint('begun')\ncommon.wait_for_turn('--wait' in sys.argv)\n"


def test_engines_start_before_their_turn(module: Any, tmp_path: Path) -> None:
    module(WAITS + "print('measured')")
    todo = [every.Part(name, "made_up_part", 60, early=name != "b") for name in "abc"]
    with every.started(todo, tmp_path, 60) as runs:
        assert list(runs) == ["a", "c"]
        assert [every.shown(tmp_path / name).splitlines() for name in "ac"] == 2 * [["begun", common.READY]]
        assert runs["a"].go(60) is None
        assert every.shown(tmp_path / "a").endswith("measured")
        assert "measured" not in every.shown(tmp_path / "c")
        left = runs["c"]._process
    assert left.poll() == -signal.SIGKILL, "its turn never came"


def test_engines_of_one_that_fails_end_with_it(module: Any, tmp_path: Path) -> None:
    module(
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path(sys.argv[2] + '.pid').write_text(str(child.pid))\n"
        "raise ValueError('why')"
    )
    with every.started([every.Part("a", "made_up_part", 60, early=True)], tmp_path, 60) as runs:
        assert ended(int((tmp_path / "a.pid").read_text()))
        assert runs["a"].go(60) == "exit status 1: ValueError: why"


def ended(pid: int) -> bool:
    """Within some seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":  # nobody has asked for its status
            return True
        time.sleep(0.1)
    return False


def test_when_it_is_stopped_nobody_measures(module: Any, tmp_path: Path) -> None:
    """Those that wait end as well, however it ends."""
    module(WAITS + "print('measured')")
    code = (
        "import sys, time\n"
        "from benchmarks import all as every, common\n"
        "todo = [every.Part(name, 'made_up_part', 60, early=True) for name in ('a', 'b')]\n"
        "todo[0] = every.Part('slow', 'time', 60)\n"
        "every.parts = lambda *args: todo\n"
        "common.need_gpu = lambda: None\n"
        f"sys.argv = ['all', '--out-dir', {str(tmp_path)!r}]\n"
        "every.Run.go = lambda run, seconds: time.sleep(60)\n"
        "every.main()\n"
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        (tmp_path / "b.log").write_text("")
        process = subprocess.Popen([sys.executable, "-c", code], cwd=every.ROOT)
        while common.READY not in (tmp_path / "b.log").read_text():
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(0.5)  # it has seen that too
        process.send_signal(number)
        assert process.wait(30) == (1 if number == signal.SIGTERM else -number)
        for _ in range(50):
            if not any(str(tmp_path) in line for line in running()):
                break
            time.sleep(0.1)
        assert not any(str(tmp_path) in line for line in running())
        assert "measured" not in (tmp_path / "b.log").read_text()


def running() -> list[str]:
    """Command lines of all processes."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines


def test_the_end_of_a_long_log_is_enough(module: Any, tmp_path: Path) -> None:
    module("print('x' * 10_000_000)\n" + WAITS + "print('measured')")
    with every.started([every.Part("a", "made_up_part", 60, early=True)], tmp_path, 60) as runs:
        assert runs["a"].ready()
        assert len(every.tail(tmp_path / "a.log")) == every.TAIL
        assert runs["a"].go(60) is None


def test_one_that_does_not_get_ready_is_not_waited_for(module: Any, tmp_path: Path) -> None:
    module("import sys, time\nif 'late' in sys.argv[2]: time.sleep(60)\nraise ValueError('why')")
    todo = [every.Part(name, "made_up_part", 60, early=True) for name in ("early", "late")]
    start = time.monotonic()
    with every.started(todo, tmp_path, 1) as runs:
        assert 1 <= time.monotonic() - start < 30
        assert runs["early"].go(60) == "exit status 1: ValueError: why"
        assert runs["late"].go(0.1) == "stopped after 0 s"


def test_all_in_turn(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(
        "import pathlib, sys, time\n"
        "with open(sys.argv[2] + '.starts', 'a') as file: file.write('x')\n"
        "if '--wait' in sys.argv:\n"
        "    from benchmarks import common\n"
        "    common.wait_for_turn(True)\n"
        "print('measured', flush=True)\n"
        "time.sleep(60 if 'slow' in sys.argv[2] else 0)\n"
    )
    todo = [every.Part("one", "made_up_part", 60, early=True), every.Part("slow", "made_up_part", 3)]
    todo += [every.Part("none", "made_up_part", 60)]
    monkeypatch.setattr(every, "parts", lambda *args: todo)
    monkeypatch.setattr(common, "need_gpu", lambda: None)
    go = every.Run.go

    def run_out(part: every.Run, seconds: float) -> str | None:
        problem = go(part, seconds)
        if problem:
            monkeypatch.setattr(every, "LEAST", 1e6)
        return problem

    monkeypatch.setattr(every.Run, "go", run_out)
    monkeypatch.setattr(every.signal, "signal", lambda *args: None)
    monkeypatch.setattr(sys, "argv", ["all", "--out-dir", str(tmp_path), "--minutes", "1"])
    for name in ("one.json", "none.md"):
        (tmp_path / name).write_text("of an earlier run")
    assert every.main() == 1
    text = (tmp_path / "summary.md").read_text()
    assert re.search(r"## engines that started side by side\n\n\d+ s: one.\n", text)
    assert re.search(r"## one\n\n\d s\n\n.*measured\n", text, re.DOTALL)
    assert (tmp_path / "one.starts").read_text() == "x"
    assert not (tmp_path / "one.json").exists()
    assert re.search(r"## slow\n\n3 s. FAILED: stopped after 3 s\n\nmeasured\n", text)
    assert text.endswith("## none\n\nLeft out: no time was left.\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("benchmark", [cycle, scaling, every])
def test_without_a_gpu_it_says_so(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        benchmark.main()
