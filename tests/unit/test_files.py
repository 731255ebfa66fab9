"""Opening what others may have put there."""

import errno
import json
import mmap
import os
import resource
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import odd_files
from tests.support.odd_files import in_time
from vllm_lora_reload import diagnosis, files
from vllm_lora_reload.adapters import Adapters, fingerprint
from vllm_lora_reload.files import Folder, open_regular, read_json
from vllm_lora_reload.pagecache import bring_in
from vllm_lora_reload.snapshot import file_states

TICK = 0.02  # seconds; the kernel's clock for files goes by a few milliseconds


@pytest.mark.parametrize("harm", odd_files.KINDS)
def test_json_that_is_none(harm: Callable[[Path], None], tmp_path: Path) -> None:
    """An error of two kinds, soon, and without the memory that the file would take."""
    path = tmp_path / "folder" / "config.json"
    path.parent.mkdir()
    harm(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((OSError, ValueError)):
        in_time(lambda: read_json(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB


def test_json_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "JSON_LIMIT", 100)
    (tmp_path / "a").write_text(json.dumps("a" * 200))
    real = os.fstat

    def fstat(fd: int) -> Any:
        found = real(fd)
        return SimpleNamespace(st_size=0, st_mode=found.st_mode)

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        files.parse_json(SimpleNamespace(fileno=lambda: 0, read=(tmp_path / "a").open("rb").read))  # type: ignore[arg-type]


def test_json_as_it_should_be(tmp_path: Path) -> None:
    """A link may lead to it, as in a hub's cache; whole pairs are fine."""
    (tmp_path / "a").write_text('{"r": 8, "\\ud83d\\ude00": null}')
    (tmp_path / "b").symlink_to("a")
    assert read_json(tmp_path / "b") == {"r": 8, "😀": None}


@pytest.mark.parametrize("what", ["fifo", "folder", "/dev/zero", "socket"])
def test_only_regular_files_are_opened(what: str, tmp_path: Path) -> None:
    import socket

    path = tmp_path / "it"
    if what == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif what == "/dev/zero":
        path.symlink_to(what)
    else:
        getattr(odd_files, what)(path)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not a regular file") as caught:
        in_time(lambda: open_regular(path))
    assert caught.value.errno == errno.EINVAL
    assert set(os.listdir("/proc/self/fd")) <= before


def test_states_and_reading_ahead_do_not_wait(tmp_path: Path) -> None:
    import threading

    odd_files.fifo(tmp_path / "shard")
    with pytest.raises(OSError, match="not a regular file"):
        in_time(lambda: file_states([tmp_path / "shard"]))
    in_time(lambda: bring_in([tmp_path / "shard"], threading.Event()))


# --- Changes that put size and time back ---------------------------------------------------------------------------


def in_place(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


def through_a_hard_link(path: Path) -> None:
    other = path.with_name("other")
    os.link(path, other)
    in_place(other)
    other.unlink()


def through_a_mapping(path: Path) -> None:
    """Without ``msync``: the kernel notes the first write to a page that is on the disk."""
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        mapped[:2] = mapped[:2][::-1]


def another_in_its_place(path: Path) -> None:
    path.rename(path.with_name("old"))
    path.write_bytes(path.with_name("old").read_bytes()[::-1])


@pytest.mark.parametrize("change", [in_place, through_a_hard_link, through_a_mapping, another_in_its_place])
def test_a_change_shows_though_its_time_was_put_back(change: Callable[[Path], None], tmp_path: Path) -> None:
    """Of a checkpoint's file and of an adapter's."""
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(bytes(range(256)) * 16)
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
    status = path.stat()
    before = file_states([path]), fingerprint(str(tmp_path))
    assert before == (file_states([path]), fingerprint(str(tmp_path)))
    time.sleep(TICK)
    change(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert file_states([path]) != before[0] and fingerprint(str(tmp_path)) != before[1]


# --- Adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", odd_files.KINDS)
def test_a_config_that_is_none_has_no_settings(harm: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "adapter" / "adapter_config.json"
    path.parent.mkdir()
    harm(path)
    assert in_time(lambda: diagnosis.adapter_rank(str(path.parent))) is None
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        in_time(lambda: diagnosis.peft_config(str(path.parent)))


@pytest.mark.parametrize("harm", [odd_files.fifo, odd_files.folder, odd_files.sparse])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_the_engine_is_not_given_what_it_would_wait_for(
    harm: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    """vLLM opens both without looking. A large file of tensors is its affair."""
    harm(tmp_path / name)
    adapters: Any = SimpleNamespace()
    request = SimpleNamespace(lora_path=str(tmp_path))
    fine = harm is odd_files.sparse and name.endswith(".safetensors")
    with pytest.raises(EOFError if fine else (OSError, ValueError)):
        Adapters._read(adapters, request, _load)


def _load(request: Any) -> Any:
    raise EOFError


@pytest.mark.parametrize("folder", ["", "no/such/folder", "nul\0", "\ud800"])
def test_paths_that_are_none_are_left_to_the_engine(folder: str) -> None:
    assert fingerprint(folder) == ()
    with pytest.raises(EOFError):
        Adapters._read(SimpleNamespace(worker_manager=None), SimpleNamespace(lora_path=folder), _load)  # type: ignore[arg-type]


@pytest.mark.parametrize("harm", odd_files.KINDS)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors"])
def test_a_failed_load_is_explained_without_waiting(harm: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    harm(tmp_path / "model" / name)
    assert str(in_time(lambda: diagnosis.where("a", tmp_path / "model"))).startswith(f"{tmp_path / 'model' / name} is")


# --- Folders of this package ---------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_for_this_user(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        with Folder(tmp_path / "above" / "it", create=True) as folder:
            os.close(folder.create("file"))
            os.close(folder.create("lock", anew=False))
    finally:
        os.umask(mask)
    assert mode(tmp_path / "above") == mode(tmp_path / "above" / "it") == 0o700
    assert mode(tmp_path / "above" / "it" / "file") == mode(tmp_path / "above" / "it" / "lock") == 0o600


@pytest.mark.parametrize("harm", [odd_files.fifo, odd_files.link, odd_files.folder])
def test_no_file_is_made_elsewhere(harm: Callable[[Path], None], tmp_path: Path) -> None:
    with Folder(tmp_path / "it", create=True) as folder:
        harm(tmp_path / "it" / "name")
        for anew in (True, False):
            with pytest.raises(OSError, match=r"name|File exists|Is a directory|symbolic links"):
                in_time(lambda anew=anew: folder.create("name", anew))  # type: ignore[misc]
        folder.remove("name")
        assert os.path.lexists(tmp_path / "it" / "name") and not (tmp_path / "elsewhere").exists()
        folder.make_way("name")
        os.close(folder.create("name"))
        folder.remove("name")
        assert [name.endswith(".aside") for name in folder.names()] == [True]


def test_a_link_is_no_folder_of_ours(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "it").symlink_to("real")
    for create in (True, False):
        with pytest.raises(NotADirectoryError, match="a link, which is not followed"):
            Folder(tmp_path / "it", create)
    with Folder(tmp_path / "it" / "below", create=True):  # where a user's setting leads
        assert (tmp_path / "real" / "below").is_dir()


def test_others_may_not_write(tmp_path: Path) -> None:
    """A folder is taken from them where one is to be written, a file is not used."""
    (tmp_path / "it").mkdir()
    (tmp_path / "it").chmod(0o775)
    with pytest.raises(PermissionError, match="other users may write to it"):
        Folder(tmp_path / "it")
    with Folder(tmp_path / "it", create=True) as folder:
        assert mode(tmp_path / "it") == 0o700
        (tmp_path / "it" / "file").write_text("a")
        (tmp_path / "it" / "file").chmod(0o644)
        folder.open("file").close()
        (tmp_path / "it" / "file").chmod(0o664)
        with pytest.raises(PermissionError, match="other users may write to it"):
            folder.open("file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_belongs_to_others_is_not_used(tmp_path: Path) -> None:
    with Folder(tmp_path / "it", create=True) as folder:
        os.close(folder.create("file"))
        os.chown(tmp_path / "it" / "file", 1234, -1)
        with pytest.raises(PermissionError, match="belongs to user 1234, and this process runs as user 0"):
            folder.open("file")
    os.chown(tmp_path / "it", 1234, -1)
    for create in (True, False):
        with pytest.raises(PermissionError, match="belongs to user 1234"):
            Folder(tmp_path / "it", create)
