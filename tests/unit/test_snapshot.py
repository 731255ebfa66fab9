"""Snapshots of tensors on the CPU: what is written, what fits, what is read back, and what goes wrong on the way."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open

from tests.support import odd_files
from tests.support.odd_files import in_time
from vllm_lora_reload import SnapshotError, keeper, snapshot
from vllm_lora_reload.checksum import digests
from vllm_lora_reload.files import Folder
from vllm_lora_reload.keeper import SnapshotKeeper
from vllm_lora_reload.ring import EndOfFileError, Ring
from vllm_lora_reload.snapshot import (
    Engine,
    Lock,
    Manifest,
    Snapshot,
    Storage,
    digests_of,
    file_states,
    storages,
    write,
)
from vllm_lora_reload.tensors import storage_key

CPU = torch.device("cpu")
ENGINE = Engine("org/model", "0.30.0", "torch.bfloat16", None, {"tp": [0, 2], "pp": [0, 1]})


def named() -> dict[str, torch.Tensor]:
    """Tied, transposed, strided, empty, a view of a larger storage, of an odd number of bytes, and a scalar."""
    generator = torch.Generator().manual_seed(1)
    embed = torch.randn(500, 8, generator=generator).bfloat16()
    fused = torch.randn(6, 400, generator=generator)
    return {
        "embed.weight": embed,
        "fused.weight": fused.t(),
        "head.weight": embed,
        "part.weight": torch.randn(100, generator=generator)[10:20],
        "odd": torch.arange(13, dtype=torch.uint8),
        "scale": torch.tensor(0.5),
        "empty": torch.empty(0),
        "flag": torch.tensor([True, False]),
    }


def found(tensors: dict[str, torch.Tensor], kept: tuple[str, ...] = ("scale",)) -> list[Storage]:
    return storages(tensors.items(), CPU, set(), {storage_key(tensors[name]) for name in kept if name in tensors})


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring(CPU, threads=2, chunk=1 << 20)
    yield ring
    ring.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return ENGINE.folder(tmp_path) / f"{ENGINE.rank}.json"


def test_storages_are_listed_once_under_all_their_names() -> None:
    tensors = named()
    listed = found(tensors)
    assert [list(storage.tensors) for storage in listed] == [
        ["embed.weight", "head.weight"],
        ["fused.weight"],
        ["part.weight"],
        ["odd"],
        ["scale"],
        ["flag"],
    ]
    assert [storage.loaded for storage in listed] == [True, True, True, True, False, True]
    assert listed[2].memory.numel() == 400  # all of the storage, not only the view
    lora = {storage_key(tensors["odd"])}
    assert "odd" not in [storage.name for storage in storages(tensors.items(), CPU, lora, set())]
    meta = {"meta": torch.empty(3, device="meta")}
    assert storages(meta.items(), CPU, set(), set()) == []


@pytest.mark.parametrize("reader", ["buffered", "direct"])
def test_written_and_read_back(path: Path, reader: Any) -> None:
    ring = Ring(CPU, threads=2, reader=reader)
    tensors = named()
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    listed = found(tensors, kept=())
    whole = [storage.memory.clone() for storage in listed]
    write(path, ENGINE, listed, digests_of(listed))
    taken = Snapshot.find(path, ENGINE, listed, digests_of(listed))
    for storage in listed:
        storage.memory.fill_(0xFF)
    assert taken.restore(listed, ring) == sum(storage.memory.numel() for storage in listed)
    taken.check(listed)
    assert all(torch.equal(storage.memory, before) for storage, before in zip(listed, whole, strict=True))
    assert all(torch.equal(tensors[name], value) for name, value in values.items())
    ring.close()


def test_the_file_is_safetensors(path: Path) -> None:
    tensors = named()
    taken = write(path, ENGINE, found(tensors), digests_of(found(tensors)))
    with safe_open(taken.file, "pt") as opened:
        assert set(opened.keys()) == {"embed.weight", "fused.weight", "part.weight", "odd", "scale", "flag"}
        for name in ("embed.weight", "odd", "scale", "flag"):
            assert torch.equal(opened.get_tensor(name), tensors[name])
        assert opened.get_tensor("part.weight").shape == (400,)  # bytes, where a tensor is not all of its storage
        assert opened.get_tensor("fused.weight").numel() == 9600
    assert taken.manifest.entries[0].offset % 4096 == 0


def test_manifest_says_what_is_where(path: Path) -> None:
    listed = found(named())
    taken = write(path, ENGINE, listed, digests_of(listed))
    read = Manifest.read(path)
    assert read == taken.manifest
    assert read.engine == ENGINE and read.size == taken.file.stat().st_size
    entry = read.entries[1]
    assert entry.tensors == [
        {"name": "fused.weight", "shape": [400, 6], "stride": [1, 400], "dtype": "float32", "storage_offset": 0}
    ]
    content = taken.file.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    assert content == listed[1].memory.numpy().tobytes()
    assert read.digests() == digests_of(listed)
    assert [entry.loaded for entry in read.entries] == [True, True, True, True, False, True]


def test_large_tensors_go_in_blocks(path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_WRITE", 8192)
    tensors = {"a": torch.randn(7000), "b": torch.randn(3), "c": torch.randn(5001)}
    listed = found(tensors, kept=())
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    write(path, ENGINE, listed, digests_of(listed))
    for tensor in tensors.values():
        tensor.fill_(-1)
    Snapshot.find(path, ENGINE, listed, [e.digest for e in Manifest.read(path).entries]).restore(listed, ring)
    assert all(torch.equal(tensors[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (replace(ENGINE, release="0.31.0"), r"taken with release '0.30.0', and this is '0.31.0'"),
        (replace(ENGINE, dtype="torch.float16"), "dtype"),
        (replace(ENGINE, quantization="awq"), "quantization None, and this is 'awq'"),
        (replace(ENGINE, model="org/other"), "model"),
        (replace(ENGINE, place={"tp": [1, 2], "pp": [0, 1]}), "place"),
    ],
)
def test_of_another_engine(path: Path, engine: Engine, message: str) -> None:
    listed = found(named())
    write(path, ENGINE, listed, digests_of(listed))
    with pytest.raises(SnapshotError, match=f"is not used: it was taken with .*{message}|{message}"):
        Snapshot.find(path, engine, listed, digests_of(listed))


def _other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed.weight"] = tensors["embed.weight"].view(250, 16)


def _other_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["odd"] = tensors["odd"].view(torch.int8)


def _other_stride(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fused.weight"] = tensors["fused.weight"].contiguous()


def _untied(tensors: dict[str, torch.Tensor]) -> None:
    tensors["head.weight"] = tensors["head.weight"].clone()


def _one_less(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["flag"]


@pytest.mark.parametrize("change", [_other_shape, _other_dtype, _other_stride, _untied, _one_less])
def test_of_another_layout(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = named()
    write(path, ENGINE, found(tensors), digests_of(found(tensors)))
    change(tensors)
    with pytest.raises(SnapshotError, match=r"is not used: "):
        Snapshot.find(path, ENGINE, found(tensors), digests_of(found(tensors)))


def test_of_other_weights(path: Path) -> None:
    tensors = named()
    write(path, ENGINE, found(tensors), digests_of(found(tensors)))
    tensors["head.weight"][3, 3] += 1
    with pytest.raises(SnapshotError, match=r"other weights were loaded, 1 tensors \(embed.weight\) differ"):
        Snapshot.find(path, ENGINE, found(tensors), digests_of(found(tensors)))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 99}', '{"format": 1, "engine": {}}'])
def test_an_unreadable_manifest(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(SnapshotError, match=f"{path.name}.*(cannot be read|has format 99)"):
        Snapshot.find(path, ENGINE, [], [])


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _flip(file: Path) -> None:
    """One bit, with the time of the last change put back."""
    stat = file.stat()
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _touch(file: Path) -> None:
    os.utime(file)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_cut, "has changed since it was written"),
        (_touch, "has changed since it was written"),
        (_flip, r"is damaged: 1 tensors \(odd\) came back with other bytes"),
    ],
)
def test_a_file_that_changed(path: Path, ring: Ring, harm: Callable[[Path], None], message: str) -> None:
    listed = found(named())
    write(path, ENGINE, listed, digests_of(listed))
    taken = Snapshot.find(path, ENGINE, listed, digests_of(listed))
    harm(taken.file)
    if harm is not _flip:
        with pytest.raises(SnapshotError, match=message):
            Snapshot.find(path, ENGINE, listed, digests_of(listed))
    with pytest.raises(SnapshotError, match=message):
        taken.restore(listed, ring)
        taken.check(listed)


def test_a_file_that_is_gone(path: Path, ring: Ring) -> None:
    """Who has taken it up can still read it; nobody else can take it up."""
    listed = found(named())
    taken = write(path, ENGINE, listed, digests_of(listed))
    taken.file.unlink()
    with pytest.raises(SnapshotError, match="cannot be opened"):
        Snapshot.find(path, ENGINE, listed, digests_of(listed))
    listed[0].memory.fill_(0xFF)
    taken.restore(listed, ring)
    taken.check(listed)


def test_what_is_kept_elsewhere_counts_but_is_not_restored(path: Path, ring: Ring) -> None:
    """Buffers of a checkpoint, which vLLM keeps over the sleep: their bytes have to be the snapshot's all the same."""
    tensors = named()
    key = storage_key(tensors["scale"])

    def listed() -> list[Storage]:
        return storages(tensors.items(), CPU, set(), {key}, {key})

    taken = write(path, ENGINE, listed(), digests_of(listed()))
    tensors["scale"].fill_(7)
    taken.restore(listed(), ring)
    assert tensors["scale"] == 7
    with pytest.raises(SnapshotError, match="scale"):
        Snapshot.find(path, ENGINE, listed(), digests_of(listed()))


def test_what_no_load_brings_stays_as_it_is(path: Path, ring: Ring) -> None:
    """Also if the file is damaged just there: whoever loads the checkpoint instead could not mend it."""
    tensors = named()
    listed = found(tensors)
    taken = write(path, ENGINE, listed, digests_of(listed))
    tensors["scale"].fill_(7)
    taken.restore(listed, ring)
    taken.check(listed)
    assert tensors["scale"] == 7


def test_a_sample_is_checked(path: Path) -> None:
    tensors = {f"t{n}": torch.full((4,), n) for n in range(8)}
    listed = found(tensors, kept=())
    taken = write(path, ENGINE, listed, digests_of(listed))
    tensors["t5"].fill_(9)
    for first in range(4):
        with pytest.raises(SnapshotError, match="t5") if first == 1 else contextlib.nullcontext():
            taken.check(listed, every=4, first=first)


@pytest.mark.parametrize("when", ["before", "midway", "at the manifest"])
def test_a_full_disk(path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left, and the old snapshot is still good."""
    tensors = named()
    old = write(path, ENGINE, found(tensors), digests_of(found(tensors)))
    tensors["odd"] += 1
    listed = found(tensors)
    if when == "before":
        usage = SimpleNamespace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    elif when == "at the manifest":

        def dump(*args: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(json, "dump", dump)
    else:
        monkeypatch.setattr(snapshot, "_WRITE", 4096)
        real = os.pwrite

        def pwrite(fd: int, data: Any, at: int) -> int:
            if at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data, at)

        monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left") as caught:
        write(path, ENGINE, listed, digests_of(listed))
    assert caught.value.errno == errno.ENOSPC
    assert {file.name for file in path.parent.iterdir()} == {path.name, old.file.name}
    assert Manifest.read(path) == old.manifest


def test_bytes_that_changed_on_the_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a trainer that writes into a parameter, say, and back again."""
    listed = found(named())
    current = digests_of(listed)
    real = os.pwrite

    def pwrite(fd: int, data: Any, at: int) -> int:
        content = bytearray(data)
        content[5000] ^= 4
        return real(fd, data[:0], at) or real(fd, memoryview(content), at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "O_DIRECT", 0)
    with pytest.raises(SnapshotError, match=r"1 tensors \(embed.weight\) changed while they were written"):
        write(path, ENGINE, listed, current)
    assert not list(path.parent.iterdir())


def test_what_no_load_brings_may_change_on_the_way(path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale or a workspace that a forward pass writes; the file's digest is that of the file."""
    tensors = named()
    listed = found(tensors)
    current = digests_of(listed)

    @contextlib.contextmanager
    def reading() -> Iterator[None]:
        tensors["scale"] += 1
        yield

    taken = write(path, ENGINE, listed, current, reading)
    entry = next(entry for entry in taken.manifest.entries if entry.name == "scale")
    content = torch.frombuffer(bytearray(taken.file.read_bytes()[entry.offset :][: entry.nbytes]), dtype=torch.uint8)
    assert entry.digest == f"{digests([content])[0]:016x}" and content.view(torch.float32).item() > 0.5


def test_files_without_a_manifest_are_removed(path: Path) -> None:
    """As of a writer that was killed between the two; those of another rank stay."""
    listed = found(named())
    write(path, ENGINE, listed, digests_of(listed))
    left, other = (path.with_name(f"{stem}-{'0' * 16}.safetensors") for stem in (path.stem, "tp1of2-pp0of1"))
    left.touch(), other.touch()
    taken = write(path, ENGINE, listed, digests_of(listed))
    assert {file.name for file in path.parent.iterdir()} == {path.name, taken.file.name, other.name}


def test_a_file_that_is_changed_while_it_is_read(path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = found(named())
    taken = write(path, ENGINE, listed, digests_of(listed))
    real = ring.read

    def read(wanted: Any) -> None:
        real(wanted)
        os.utime(taken.file, ns=(1, 1))

    monkeypatch.setattr(ring, "read", read)
    with pytest.raises(SnapshotError, match="has changed since it was written"):
        taken.restore(listed, ring)


@pytest.mark.parametrize("tensors", [[], [{}], [{"name": ""}], [3]])
def test_a_manifest_without_names(path: Path, tensors: Any) -> None:
    listed = found(named())
    write(path, ENGINE, listed, digests_of(listed))
    content = json.loads(path.read_text())
    content["entries"][1]["tensors"] = tensors
    path.write_text(json.dumps(content))
    with pytest.raises(SnapshotError, match="cannot be read"):
        Snapshot.find(path, ENGINE, listed, digests_of(listed))


def test_no_descriptor_stays_open_if_flushing_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = found(named())
    current = digests_of(listed)

    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Input/output error"):
        write(path, ENGINE, listed, current)
    assert set(os.listdir("/proc/self/fd")) <= before and not list(path.parent.iterdir())


def test_a_new_one_takes_the_place_of_the_old(path: Path) -> None:
    tensors = named()
    old = write(path, ENGINE, found(tensors), digests_of(found(tensors)))
    tensors["odd"] += 1
    new = write(path, ENGINE, found(tensors), digests_of(found(tensors)))
    assert {file.name for file in path.parent.iterdir()} == {path.name, new.file.name}
    assert new.file != old.file


def test_one_folder_for_each_kind_of_engine(tmp_path: Path) -> None:
    kinds = [
        ENGINE,
        replace(ENGINE, model="elsewhere/model"),
        replace(ENGINE, dtype="torch.float16"),
        replace(ENGINE, quantization="fp8"),
        replace(ENGINE, place={"tp": [0, 4], "pp": [0, 1]}),
    ]
    assert len({engine.folder(tmp_path) for engine in kinds}) == len(kinds)
    other_rank = replace(ENGINE, place={"tp": [1, 2], "pp": [0, 1]})
    assert other_rank.folder(tmp_path) == ENGINE.folder(tmp_path) and other_rank.rank != ENGINE.rank
    assert replace(ENGINE, release="0.31.0").folder(tmp_path) == ENGINE.folder(tmp_path)


def test_one_writer_at_a_time(path: Path) -> None:
    first, second = Lock(path), Lock(path)
    assert first.take()
    left = [path.with_name(f".{path.stem}{end}.99.part") for end in (f"-{'0' * 16}.safetensors", ".json")]
    other = [path.with_name(f".{path.stem}{end}.part") for end in ("", "-0.safetensors.99", "-notes.json.99")]
    for file in left + other:
        file.touch()
    assert not second.take() and all(file.exists() for file in left)
    first.release()
    assert second.take() and not any(file.exists() for file in left)
    assert all(file.exists() for file in other)  # not names that are written here
    second.release()


def test_states_of_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_text("a")
    before = file_states([file])
    assert before == file_states([file]) and list(before) == [file]
    file.write_text("b")
    os.utime(file, ns=(1, 1))
    assert file_states([file]) != before
    file.unlink()
    with pytest.raises(FileNotFoundError):
        file_states([file])


def test_states_are_asked_of_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, a network file system may answer what was so a minute ago."""
    (tmp_path / "a").write_text("a")
    monkeypatch.setattr(Path, "stat", lambda self, **kwargs: pytest.fail("asked by name"))
    monkeypatch.setattr(os, "stat", lambda *args, **kwargs: pytest.fail("asked by name"))
    assert file_states([tmp_path / "a"])


# --- Hostile folders -----------------------------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside the folder that nobody is to touch."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    return victim


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", ["../../victim", "{victim}", "/dev/null", "victim\0", "", ".", "other.safetensors"])
def test_a_manifest_names_only_what_would_be_written(path: Path, victim: Path, name: str, tmp_path: Path) -> None:
    """Whatever it names is neither opened nor removed, though size and time are right."""
    listed = found(named())
    taken = write(path, ENGINE, listed, digests_of(listed))
    for copy in (victim, path.with_name("other.safetensors")):
        shutil.copy2(taken.file, copy)
    content = victim.read_bytes()
    rewrite(path, file=name.format(victim=victim))
    with pytest.raises(SnapshotError, match="cannot be read"):
        Snapshot.find(path, ENGINE, listed, digests_of(listed))
    forged = replace(taken.manifest, file=name.format(victim=victim))
    Snapshot.forget(SimpleNamespace(path=path, manifest=forged, file=victim))  # type: ignore[arg-type]
    assert victim.read_bytes() == content and path.with_name("other.safetensors").exists()


@pytest.mark.parametrize("what", ["manifest", "file"])
def test_links_are_neither_followed_nor_removed_by_the_way(path: Path, victim: Path, what: str) -> None:
    listed = found(named())
    taken = write(path, ENGINE, listed, digests_of(listed))
    linked = path if what == "manifest" else taken.file
    linked.rename(victim)
    linked.symlink_to(victim)
    content = victim.read_bytes()
    with pytest.raises(SnapshotError, match=r"cannot be (read|opened).*not a regular file"):
        Snapshot.find(path, ENGINE, listed, digests_of(listed))
    new = write(path, ENGINE, listed, digests_of(listed))
    assert victim.read_bytes() == content and not linked.is_symlink()
    assert Snapshot.find(path, ENGINE, listed, digests_of(listed)).manifest == new.manifest


@pytest.mark.parametrize("what", ["manifest", "file", "lock"])
@pytest.mark.parametrize("harm", odd_files.KINDS)
def test_damage_heals(tmp_path: Path, path: Path, harm: Callable[[Path], None], what: str) -> None:
    """The engine starts soon, has a snapshot in the end, and nothing of somebody else's is lost."""
    Worker(tmp_path).start().wait()
    place = {"manifest": path, "file": next(path.parent.glob("*.safetensors")), "lock": path.with_suffix(".lock")}[what]
    path.unlink()  # so that one has to be written
    place.unlink(missing_ok=True)
    harm(place)
    worker = Worker(tmp_path)
    in_time(worker.start)
    assert worker.wait()["state"] == "valid", worker.keeper.state()
    assert Worker(tmp_path, "never").start().wait()["state"] == "valid"
    assert place.is_file() and not place.is_symlink() and not (tmp_path / "elsewhere").exists()
    if harm is odd_files.folder:
        assert [file.read_text() for file in path.parent.glob(".*.aside/*")] == ["precious"]


@pytest.mark.parametrize("harm", [odd_files.folder, odd_files.fifo])
def test_what_a_dead_writer_may_have_left_is_removed_if_it_is_a_file(path: Path, harm: Callable[[Path], None]) -> None:
    path.parent.mkdir(mode=0o700)
    left = path.with_name(f".{path.name}.77.part")
    harm(left)
    lock = Lock(path)
    assert lock.take() and os.path.lexists(left)
    lock.release()


def test_a_linked_folder_is_not_followed(tmp_path: Path, path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    path.parent.symlink_to("elsewhere")
    state = Worker(tmp_path).start().wait()
    assert state["state"] == "none" and "a link, which is not followed" in state["reason"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_files_are_for_this_user(path: Path) -> None:
    mask = os.umask(0)
    try:
        taken = write(path, ENGINE, found(named()), digests_of(found(named())))
        lock = Lock(path)
        assert lock.take()
        lock.release()
    finally:
        os.umask(mask)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    modes = {file.suffix: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert modes == {".json": 0o600, ".safetensors": 0o600, ".lock": 0o600} and taken.file.exists()


def test_what_others_may_write_to_is_not_used(tmp_path: Path, path: Path) -> None:
    """Others' rights to a folder of ours are taken away, and a file that they could write to is written anew."""
    Worker(tmp_path).start().wait()
    file = next(path.parent.glob("*.safetensors"))
    path.parent.chmod(0o777), file.chmod(0o666)
    assert "other users may write to it" in Worker(tmp_path, "never").start().wait()["reason"]
    state = Worker(tmp_path).start().wait()
    assert state["state"] == "valid" and state["seconds"] is not None
    assert path.parent.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("what", ["folder", "manifest", "file"])
def test_what_others_own_is_not_used(tmp_path: Path, path: Path, what: str) -> None:
    Worker(tmp_path).start().wait()
    file = next(path.parent.glob("*.safetensors"))
    os.chown({"folder": path.parent, "manifest": path, "file": file}[what], 1234, -1)
    state = Worker(tmp_path, "never").start().wait()
    assert state["state"] == "none" and "belongs to user 1234" in state["reason"]
    state = Worker(tmp_path).start().wait()
    assert (state["state"] == "none") == (what == "folder")


def test_two_that_find_the_lock_in_the_way_do_not_both_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One renames it and makes its own while the other has only looked."""
    path.parent.mkdir(mode=0o700)
    odd_files.fifo(path.with_suffix(".lock"))
    first, second = Lock(path), Lock(path)
    real, taken = Folder.make_way, []

    def make_way(folder: Folder, name: str) -> None:
        monkeypatch.setattr(Folder, "make_way", real)
        taken.append(second.take())
        real(folder, name)

    monkeypatch.setattr(Folder, "make_way", make_way)
    assert first.take() and taken == [False] and not second.take()
    first.release()
    assert second.take()
    second.release()


def test_a_lock_that_somebody_has_removed_is_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next one would make another, and two would write."""
    lock, other = Lock(path), Lock(path)
    real = fcntl.flock

    def flock(fd: int, how: int) -> None:
        real(fd, how)
        path.with_suffix(".lock").unlink()

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", flock)
        assert not lock.take()
    assert other.take()
    other.release()


def test_a_manifest_of_before_is_read_and_its_file_checked_once(path: Path, ring: Ring) -> None:
    """It does not say when anything about the file was last changed."""
    listed = found(named())
    write(path, ENGINE, listed, digests_of(listed))
    content = json.loads(path.read_text())
    del content["ctime_ns"]
    path.write_text(json.dumps(content))
    taken = Snapshot.find(path, ENGINE, listed, digests_of(listed))
    surely = []
    for _ in range(2):
        taken.restore(listed, ring)
        surely.append(taken.surely_unchanged)
        taken.check(listed)
    assert surely == [False, True]


def test_new_names_and_rights_cost_one_check(path: Path, ring: Ring) -> None:
    listed = found(named())
    taken = write(path, ENGINE, listed, digests_of(listed))
    surely = []
    for change in (lambda: None, lambda: time.sleep(0.02) or taken.file.chmod(0o400), lambda: None):
        change()
        taken.restore(listed, ring)
        surely.append(taken.surely_unchanged)
        taken.check(listed)
    assert surely == [True, False, True]


# --- The keeper ---------------------------------------------------------------------------------------------------


class Worker:
    """A keeper and the tensors that it keeps."""

    def __init__(
        self,
        folder: Path,
        when: Literal["once", "always", "never"] = "once",
        engine: Engine = ENGINE,
        verify: Literal["off", "sample", "full"] = "full",
    ) -> None:
        self.tensors = named()
        self.ring = Ring(CPU, threads=1, chunk=1 << 20)
        self.keeper = SnapshotKeeper(folder, engine, when, verify, self.ring, lambda: found(self.tensors), CPU)

    def start(self) -> "Worker":
        self.keeper.started()
        return self

    def wait(self) -> dict[str, Any]:
        until = time.monotonic() + 10
        while self.keeper.writing:
            assert time.monotonic() < until
            time.sleep(0.005)
        return self.keeper.state()

    def change(self, by: int = 1) -> None:
        """A load that brings another value."""
        self.keeper.hold()
        self.tensors["odd"] += by
        self.keeper.loaded()
        self.keeper.release(True)

    def outdate(self) -> None:
        """Other weights are loaded, and it is noticed that the snapshot does not have them."""
        self.change()
        self.keeper.hold()
        self.keeper.compare()
        self.keeper.release(True)
        assert self.keeper.state()["state"] == "none"

    def sleep(self) -> None:
        self.keeper.hold()
        self.keeper.compare()
        for storage in found(self.tensors):
            if storage.loaded:
                storage.memory.fill_(0xFF)

    def right(self, **other: Any) -> bool:
        return all(torch.equal(self.tensors[name], value) for name, value in (named() | other).items())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_SETTLED", 0.0)


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Writing in blocks of a page, which waits before the second until it is told to go on."""
    pace = SimpleNamespace(reached=threading.Event(), go=threading.Event(), blocks=0)
    real = os.pwrite

    def pwrite(fd: int, data: Any, at: int) -> int:
        pace.blocks += 1
        if pace.blocks == 2:
            pace.reached.set()
            assert pace.go.wait(10)
        return real(fd, data, at)

    monkeypatch.setattr(snapshot, "_WRITE", 4096)
    monkeypatch.setattr(os, "pwrite", pwrite)
    yield pace
    pace.go.set()


@pytest.mark.parametrize("what", ["*.json", "*.safetensors"])
def test_written_again_on_request_if_it_was_removed(tmp_path: Path, what: str) -> None:
    worker = Worker(tmp_path).start()
    path = Path(worker.wait()["path"])
    next(path.parent.glob(what)).unlink()
    assert worker.keeper.take()["path"] == str(path)
    assert path.exists() and Worker(tmp_path, "never").start().wait()["state"] == "valid"


def test_what_was_loaded_at_start_up_is_known_once(tmp_path: Path) -> None:
    """vLLM warms up again when it scales, with other weights in memory by then."""
    worker = Worker(tmp_path).start()
    worker.wait()
    worker.change()
    worker.start()
    assert not worker.keeper.holds()


def test_taken_up_again_when_its_weights_are_back(tmp_path: Path) -> None:
    worker = Worker(tmp_path).start()
    worker.wait()
    worker.change()
    worker.sleep()
    assert worker.keeper.state()["state"] == "none"
    for storage, value in zip(found(worker.tensors), found(named()), strict=True):
        storage.memory.copy_(value.memory)
    worker.keeper.loaded()
    worker.keeper.release(True)
    worker.wait()
    worker.sleep()
    assert worker.keeper.usable and worker.keeper.of_checkpoint


def test_a_sleep_that_failed_promises_nothing(tmp_path: Path) -> None:
    worker = Worker(tmp_path).start()
    worker.wait()
    worker.keeper.hold()
    worker.keeper.compare()
    assert worker.keeper.usable
    worker.keeper.release(True)
    worker.change()
    worker.keeper.hold()
    assert not worker.keeper.usable


def test_damage_where_nobody_may_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not used again all the same."""
    worker = Worker(tmp_path).start()
    _flip(Path(worker.wait()["path"]))
    worker.sleep()

    tried: list[str] = []

    def unlink(name: str, **folder: int) -> None:
        tried.append(name)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(SnapshotError, match="is damaged"):
        worker.keeper.restore()
    assert worker.keeper.snapshot is None and "is damaged" in worker.keeper.state()["reason"]
    assert tried == [worker.keeper._path.name]


def test_a_request_does_not_wait_for_an_engine_that_sleeps(
    tmp_path: Path, pace: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_PATIENCE", 0.1)
    first = Worker(tmp_path).start()
    assert pace.reached.wait(10)
    first.sleep()
    second = Worker(tmp_path, "never").start()
    assert second.keeper.take()["reason"] == "another engine is writing it, and may be asleep"
    second.keeper.close()


def test_the_interpreter_can_end_while_it_is_written(tmp_path: Path) -> None:
    """In a process of its own: a thread in torch would abort it."""
    script = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import torch
from pathlib import Path
from tests.unit.test_snapshot import Worker
from vllm_lora_reload import keeper, snapshot
real = os.pwrite
def pwrite(*args):
    time.sleep(0.02)
    torch.randn(500, 500) @ torch.randn(500, 500)
    return real(*args)
os.pwrite, snapshot._WRITE, keeper._SETTLED = pwrite, 4096, 0.0
worker = Worker(Path({str(tmp_path)!r})).start()
time.sleep(0.05)
assert worker.keeper.writing
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert not list(tmp_path.glob("*/*.safetensors")) and not list(tmp_path.glob("*/.*.part"))


def test_written_once_then_found(tmp_path: Path) -> None:
    first = Worker(tmp_path).start()
    state = first.wait()
    assert state["state"] == "valid" and state["seconds"] > 0 and state["reason"] is None
    assert state["bytes"] == Path(state["path"]).stat().st_size
    second = Worker(tmp_path).start()
    assert second.wait() == state | {"seconds": None}
    for worker in (first, second):
        for _ in range(2):
            worker.sleep()
            assert worker.keeper.usable and worker.keeper.of_checkpoint and not worker.right()
            restored = worker.keeper.restore()
            assert worker.right() and restored["source"] == "snapshot" and restored["bytes"] > 1000
            assert 0 < restored["verify_seconds"] < restored["seconds"]
            assert worker.keeper.holds()
            worker.keeper.release(True)
            assert not worker.keeper.usable  # only for the sleep that it was compared at


def test_never_written_by_itself(tmp_path: Path) -> None:
    worker = Worker(tmp_path, "never").start()
    state = worker.wait()
    assert (state["state"], state["reason"]) == ("none", "none has been written")
    assert not list(tmp_path.iterdir())
    assert worker.ring.nbytes == 0
    assert worker.keeper.take()["state"] == "valid"
    assert Worker(tmp_path, "never").start().wait()["state"] == "valid"


def test_a_reload_may_make_other_tensors_beside_the_loaded(tmp_path: Path) -> None:
    """vLLM replaces what layers keep as plain attributes, outside the weights pool then."""
    worker = Worker(tmp_path).start()
    worker.wait()
    del worker.tensors["scale"]
    worker.sleep()
    assert worker.keeper.usable
    worker.keeper.restore()
    assert worker.keeper.holds()


def test_one_that_does_not_fit_is_not_used(tmp_path: Path) -> None:
    Worker(tmp_path).start().wait()
    other = replace(ENGINE, release="0.31.0")
    state = Worker(tmp_path, "never", other).start().wait()
    assert state["state"] == "none" and "taken with release '0.30.0'" in state["reason"]
    assert Worker(tmp_path, "once", other).start().wait()["state"] == "valid"  # written anew
    assert Worker(tmp_path, "never").start().wait()["state"] == "none"


def test_stale_after_a_load(tmp_path: Path) -> None:
    worker = Worker(tmp_path).start()
    worker.wait()
    worker.change()
    worker.sleep()
    assert not worker.keeper.usable
    assert worker.keeper.state()["reason"].startswith("other weights were loaded since it was written: 1 tensors (odd)")


def test_a_load_of_the_same_leaves_it_good(tmp_path: Path) -> None:
    worker = Worker(tmp_path).start()
    worker.wait()
    worker.keeper.hold()
    worker.keeper.loaded()
    worker.keeper.release(True)
    worker.sleep()
    assert worker.keeper.usable


def test_another_layout_by_the_time_of_the_sleep(tmp_path: Path) -> None:
    worker = Worker(tmp_path).start()
    worker.wait()
    worker.tensors["more"] = torch.ones(3)
    worker.sleep()
    assert not worker.keeper.usable and "it has 5 tensors, and this model has 6" in worker.keeper.state()["reason"]


def test_flushed_before_it_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File and manifest each before their rename, and the folder after it."""
    log: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: log.append(Path(os.readlink(f"/proc/self/fd/{fd}")).suffix or "folder"))
    real = os.replace

    def replace(part: str, to: str, **folders: int) -> None:
        log.append(f"rename {Path(to).suffix}")
        real(part, to, **folders)

    monkeypatch.setattr(os, "replace", replace)
    write(path, ENGINE, found(named()), digests_of(found(named())))
    assert log == [".part", "rename .safetensors", "folder", ".part", "rename .json", "folder"]


def test_brought_into_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it was written, and after it was found."""
    warmed: list[Path] = []
    monkeypatch.setattr(Ring, "warm", lambda ring, paths: warmed.extend(paths))
    for _ in range(2):
        worker = Worker(tmp_path).start()
        worker.wait()
        assert worker.keeper._job and worker.keeper._job.thread
        worker.keeper._job.thread.join(10)
    assert [path.suffix for path in warmed] == [".safetensors"] * 2


def test_taken_anew_after_every_load(tmp_path: Path) -> None:
    worker = Worker(tmp_path, "always").start()
    worker.wait()
    worker.change()
    changed = worker.tensors["odd"].clone()
    worker.wait()
    worker.sleep()
    assert worker.keeper.usable and not worker.keeper.of_checkpoint
    worker.keeper.restore()
    assert worker.right(odd=changed) and not worker.keeper.holds()


def test_taken_on_request(tmp_path: Path) -> None:
    worker = Worker(tmp_path).start()
    worker.wait()
    worker.change()
    assert worker.keeper.take()["state"] == "valid"
    worker.sleep()
    assert worker.keeper.usable
    state = worker.keeper.take()
    assert state["reason"] == "base weights are missing or asleep"


def test_what_no_load_brings_may_change(tmp_path: Path) -> None:
    worker = Worker(tmp_path).start()
    worker.wait()
    worker.tensors["scale"].fill_(3)
    worker.sleep()
    assert worker.keeper.usable
    worker.keeper.restore()
    assert worker.right(scale=torch.tensor(3.0))


def test_sleep_in_the_middle_of_writing(tmp_path: Path, pace: SimpleNamespace) -> None:
    """It does not wait for the disk. When the same weights are back, the writer goes on where it was."""
    worker = Worker(tmp_path).start()
    assert pace.reached.wait(10)
    worker.sleep()
    assert not worker.keeper.usable
    pace.go.set()
    time.sleep(0.1)
    assert worker.keeper.writing and pace.blocks == 2  # held up
    for storage, value in zip(found(worker.tensors), found(named()), strict=True):
        storage.memory.copy_(value.memory)
    worker.keeper.release(True)
    assert worker.wait()["state"] == "valid"
    worker.sleep()
    worker.keeper.restore()
    assert worker.right()


def test_not_released_before_weights_are_complete(tmp_path: Path, pace: SimpleNamespace) -> None:
    worker = Worker(tmp_path).start()
    assert pace.reached.wait(10)
    worker.sleep()
    worker.keeper.release(False)
    pace.go.set()
    time.sleep(0.1)
    assert pace.blocks == 2


@pytest.mark.parametrize("when", ["once", "always"])
def test_other_weights_in_the_middle_of_writing(tmp_path: Path, pace: SimpleNamespace, when: Any) -> None:
    """No file ever holds parts of two versions."""
    worker = Worker(tmp_path, when).start()
    assert pace.reached.wait(10)
    worker.change()
    pace.go.set()
    state = worker.wait()
    if when == "once":
        assert state["state"] == "none" and "changed while they were written" in state["reason"]
        assert [path.suffix for path in tmp_path.glob("*/*")] == [".lock"]
        return
    changed = worker.tensors["odd"].clone()
    worker.sleep()
    worker.keeper.restore()
    assert worker.right(odd=changed)


def test_changed_without_a_load_in_the_middle_of_writing(tmp_path: Path, pace: SimpleNamespace) -> None:
    """Whoever writes into parameters by hand: what was written does not fit then, and is not used."""
    worker = Worker(tmp_path).start()
    assert pace.reached.wait(10)
    worker.tensors["odd"] += 1
    pace.go.set()
    worker.wait()
    worker.sleep()
    assert not worker.keeper.usable


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    worker = Worker(tmp_path).start()
    state = worker.wait()
    assert state["state"] == "none" and "No space left" in state["reason"]
    worker.sleep()
    assert not worker.keeper.usable


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    state = Worker(tmp_path / "file").start().wait()
    assert state["state"] == "none" and "NotADirectoryError" in state["reason"]


@pytest.mark.parametrize("verify", ["full", "off"])
def test_wrong_reads_are_noticed_if_verified(
    tmp_path: Path, verify: Literal["full", "off"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has changed the file; what came from the disk was something else."""
    worker = Worker(tmp_path, verify=verify).start()
    worker.wait()
    worker.sleep()
    real = worker.ring.read

    def read(wanted: Any) -> None:
        real(wanted)
        worker.tensors["odd"] += 1

    monkeypatch.setattr(worker.ring, "read", read)
    with pytest.raises(SnapshotError, match="is damaged") if verify == "full" else contextlib.nullcontext():
        worker.keeper.restore()
    assert not worker.right()


@pytest.mark.parametrize("verify", ["full", "sample", "off"])
def test_a_file_that_somebody_rewrote_is_always_checked(tmp_path: Path, verify: Any) -> None:
    """Its size and the time of its last change are as they were; the kernel knows better."""
    worker = Worker(tmp_path, verify=verify).start()
    _flip(Path(worker.wait()["path"]))
    worker.sleep()
    with pytest.raises(SnapshotError, match="is damaged"):
        worker.keeper.restore()
    assert worker.keeper.state()["state"] == "none" and "is damaged" in worker.keeper.state()["reason"]
    worker.tensors = named()  # loaded
    worker.keeper.loaded()
    worker.keeper.release(True)
    assert worker.wait()["state"] == "valid"  # not the damaged one
    worker.sleep()
    worker.keeper.restore()
    assert worker.right()


@pytest.mark.parametrize(
    ("error", "at_fault"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (EndOfFileError("the file ends at byte 3"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (OSError(errno.ESTALE, "Stale file handle"), False),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), False),
        (RuntimeError("CUDA error"), False),
    ],
)
def test_a_file_that_cannot_be_read_is_not_taken_up_again(
    tmp_path: Path, error: Exception, at_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not the file's fault leaves it alone."""
    worker = Worker(tmp_path).start()
    worker.wait()
    worker.sleep()

    def read(wanted: Any) -> None:
        raise error

    monkeypatch.setattr(worker.ring, "read", read)
    with pytest.raises(SnapshotError if at_fault else type(error)):
        worker.keeper.restore()
    assert worker.keeper._path.exists() is not at_fault


def test_the_manifest_of_another_engine_stays(path: Path) -> None:
    tensors = named()
    old = write(path, ENGINE, found(tensors), digests_of(found(tensors)))
    tensors["odd"] += 1
    new = write(path, ENGINE, found(tensors), digests_of(found(tensors)))
    old.forget()
    assert Manifest.read(path) == new.manifest
    new.forget()
    assert not path.exists()


def test_what_is_not_the_files_fault_does_not_have_it_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when other weights come."""
    worker = Worker(tmp_path).start()
    worker.wait()
    file = Path(worker.keeper.state()["path"])
    worker.sleep()

    def read(wanted: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Too many"):
        patched.setattr(worker.ring, "read", read)
        worker.keeper.restore()
    worker.change()
    assert worker.wait()["state"] == "none" and file.exists()


def test_a_load_while_it_is_being_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for again, by what is in memory then."""
    worker = Worker(tmp_path).start()
    worker.wait()
    worker.outdate()
    looking, go = threading.Event(), threading.Event()
    find = Snapshot.find

    def slow(*args: Any) -> Snapshot:
        looking.set()
        assert go.wait(10)
        return find(*args)

    monkeypatch.setattr(Snapshot, "find", slow)
    worker.change(by=0)
    assert looking.wait(10)
    worker.keeper.hold()
    worker.tensors["odd"] -= 1
    worker.keeper.loaded()
    go.set()
    time.sleep(0.05)
    assert worker.keeper.writing  # it does not know yet what the load brought
    worker.keeper.release(True)
    assert worker.wait()["state"] == "valid"


def test_nothing_comes_of_a_look_that_a_request_has_overtaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(tmp_path).start()
    worker.wait()
    worker.outdate()
    looking, go = threading.Event(), threading.Event()

    def fails(*args: Any) -> Snapshot:
        looking.set()
        assert go.wait(10)
        raise ValueError("no")

    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "find", fails)
        worker.change(by=0)
        look = worker.keeper._job
        assert look and look.thread and looking.wait(10)
    assert worker.keeper.take()["state"] == "valid"
    go.set()
    look.thread.join(10)
    assert look.done and worker.keeper.state()["state"] == "valid"


def test_a_writer_that_fails_over_the_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot that holds what the sleep took is still there to come back from."""
    worker = Worker(tmp_path).start()
    worker.wait()
    Path(worker.keeper.state()["path"]).unlink()
    writing, go = threading.Event(), threading.Event()

    def full(*args: Any) -> None:
        writing.set()
        assert go.wait(10)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(keeper, "write", full)
    taking = threading.Thread(target=worker.keeper.take)
    taking.start()
    assert writing.wait(10)
    worker.sleep()
    go.set()
    time.sleep(0.05)
    assert worker.keeper.usable
    worker.keeper.restore()
    assert worker.right()
    worker.keeper.release(True)
    taking.join(10)
    assert "No space left" in worker.wait()["reason"]


def test_a_damaged_snapshot_that_somebody_is_replacing_is_left_to_him(path: Path) -> None:
    listed = found(named())
    taken = write(path, ENGINE, listed, digests_of(listed))
    lock = Lock(path)
    assert lock.take()
    taken.forget()
    assert path.exists() and taken.file.exists()
    lock.release()
    taken.forget()
    assert not path.exists() and not taken.file.exists()


def test_no_thread_to_write_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load that it would have followed is none the worse."""
    worker = Worker(tmp_path, "always").start()
    worker.wait()

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        worker.change()
        assert not worker.keeper.writing and worker.keeper.state()["reason"] == "can't start new thread"
        assert worker.keeper.take()["reason"] == "can't start new thread"
    assert worker.keeper.take()["state"] == "valid"
    worker.keeper.close()


@pytest.mark.parametrize("tensors", [1, 2, 5, 15, 16, 17, 40])
def test_a_sample_has_always_something(path: Path, tensors: int) -> None:
    """And all come in turn, in no more turns than there are tensors."""
    named = {f"t{n}": torch.full((4,), n) for n in range(tensors)}
    listed = found(named, kept=())
    taken = write(path, ENGINE, listed, digests_of(listed))
    for first in range(20, 20 + min(16, tensors)):
        taken.check(listed, every=16, first=first)
    for name in named:
        named[name].fill_(99)
        wrong = 0
        for first in range(20, 20 + min(16, tensors)):
            try:
                taken.check(listed, every=16, first=first)
            except SnapshotError:
                wrong += 1
        assert wrong == 1
        named[name].fill_(int(name[1:]))
    for tensor in named.values():
        tensor.fill_(99)
    for turn in range(32):
        with pytest.raises(SnapshotError, match="is damaged"):
            taken.check(listed, every=16, first=turn % 16)


def test_sampling_takes_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is looked at once in so many restores."""
    monkeypatch.setattr(keeper, "_SAMPLE", 3)
    worker = Worker(tmp_path, verify="sample").start()
    worker.wait()
    seen = []
    real = snapshot.digests
    for _ in range(3):
        worker.sleep()
        monkeypatch.setattr(snapshot, "digests", lambda tensors: seen.append(len(tensors)) or real(tensors))
        worker.keeper.restore()
        monkeypatch.setattr(snapshot, "digests", real)
        worker.keeper.release(True)
    assert seen == [2, 1, 2]


def test_two_engines_share_what_one_writes(tmp_path: Path, pace: SimpleNamespace) -> None:
    first = Worker(tmp_path).start()
    assert pace.reached.wait(10)
    second = Worker(tmp_path).start()
    pace.go.set()
    states = [first.wait(), second.wait()]
    assert [state["state"] for state in states] == ["valid", "valid"]
    assert states[0]["path"] == states[1]["path"] and states[1]["seconds"] is None
    assert pace.blocks == 1 + -(-sum(storage.memory.numel() for storage in found(named())) // 4096)


def test_closed_while_asleep(tmp_path: Path, pace: SimpleNamespace) -> None:
    worker = Worker(tmp_path).start()
    assert pace.reached.wait(10)
    worker.sleep()
    pace.go.set()
    worker.keeper.close()
    assert worker.keeper._job and worker.keeper._job.thread and not worker.keeper._job.thread.is_alive()
    assert [path.suffix for path in tmp_path.glob("*/*")] == [".lock"]


def close_at(folder: Path, reached: threading.Event, go: threading.Event) -> None:
    """Close a keeper when its writer has `reached` a point, at which it waits for `go`."""
    worker = Worker(folder)
    worker.tensors["more"] = torch.zeros(1 << 16)
    worker.start()
    assert reached.wait(10)
    closing = threading.Thread(target=worker.keeper.close)
    closing.start()
    while not worker.keeper._job.cancel.is_set():  # type: ignore[union-attr]
        time.sleep(0.001)
    go.set()
    closing.join(10)
    assert not closing.is_alive()


def test_closed_while_it_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shutdown does not wait for the rest of the file, of which nothing is left."""
    reached, go, blocks = threading.Event(), threading.Event(), []
    real = snapshot.digest_of_blocks

    def slow(some: Iterator[torch.Tensor]) -> int:
        def each() -> Iterator[torch.Tensor]:
            for block in some:
                blocks.append(len(block))
                reached.set()
                assert go.wait(10)
                yield block

        return real(each())

    monkeypatch.setattr(snapshot, "BLOCK_BYTES", 8192)
    monkeypatch.setattr(snapshot, "digest_of_blocks", slow)
    close_at(tmp_path, reached, go)
    assert len(blocks) == 1
    assert [path.suffix for path in tmp_path.glob("*/*")] == [".lock"]


@pytest.mark.parametrize("direct", [True, False])
def test_closed_while_it_is_written(tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after the part of a block that is on its way, and no long flush is left to the end."""
    reached, go, parts, flushed = threading.Event(), threading.Event(), [], []
    write, flush, control = os.pwrite, os.fdatasync, fcntl.fcntl

    def pwrite(fd: int, data: Any, at: int) -> int:
        parts.append(len(data))
        if len(parts) == 3:
            reached.set()
            assert go.wait(10)
        return write(fd, data, at)

    def no_direct(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT and not direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(fd, command, argument)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fdatasync", lambda fd: flushed.append(fd) or flush(fd))
    monkeypatch.setattr(fcntl, "fcntl", no_direct)
    monkeypatch.setattr(snapshot, "_PART", 8192)
    close_at(tmp_path, reached, go)
    assert len(parts) == 3 and max(parts) <= 8192
    assert len(flushed) == (0 if direct else 3)
    assert [path.suffix for path in tmp_path.glob("*/*")] == [".lock"]


@pytest.mark.parametrize("when", ["once", "never"])
def test_what_was_lost_is_known_without_a_snapshot(tmp_path: Path, when: Any, pace: SimpleNamespace) -> None:
    """While one is written, or where there is to be none; not of weights that are not those of the start."""
    worker = Worker(tmp_path, when).start()
    assert when == "never" or pace.reached.wait(10)
    worker.sleep()
    assert not worker.keeper.usable and worker.keeper.lost_first
    worker.tensors = named()
    worker.keeper.compare(complete=False)  # weights were missing
    assert not worker.keeper.lost_first
    worker.keeper.release(True)
    worker.change()
    worker.sleep()
    assert not worker.keeper.lost_first
    pace.go.set()
    worker.keeper.close()


def test_manifest_is_json_for_people(path: Path) -> None:
    listed = found(named())
    write(path, ENGINE, listed, digests_of(listed))
    content = json.loads(path.read_text())
    assert content["engine"]["place"] == {"tp": [0, 2], "pp": [0, 1]}
    assert set(content) == {"engine", "file", "size", "mtime_ns", "ctime_ns", "entries", "fingerprint", "format"}
