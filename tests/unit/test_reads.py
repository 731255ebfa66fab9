"""Single reads, by either kind. What the ring makes of them is in test_ring.py."""

import ctypes
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_lora_reload import reads
from vllm_lora_reload.reads import NativeReads, Reads, ThreadReads, reads_for

KINDS = [ThreadReads, *([NativeReads] if reads._library() else [])]


@pytest.fixture(params=KINDS)
def some(request: Any) -> Iterator[Reads]:
    made = request.param(4, 4)
    yield made
    made.close()


def read(some: Reads, slot: int, fd: int, size: int, at: int) -> tuple[int, bytes]:
    buffer = torch.full((size,), 0xFF, dtype=torch.uint8)
    some.start(slot, fd, buffer, at)
    while (got := some.done(slot)) is None:
        some.wait([slot], 10)
    return got, bytes(buffer.tolist())


def test_this_machine_has_the_native_kind() -> None:
    """Else every test of it would be left out unseen where it matters, which is Linux with glibc."""
    glibc = "CS_GNU_LIBC_VERSION" in os.confstr_names and os.confstr("CS_GNU_LIBC_VERSION")
    assert isinstance(reads_for(2, 2), NativeReads) is bool(glibc)


def _unknown(name: str) -> None:
    raise OSError(22, "Invalid argument")  # as musl has it


@pytest.mark.parametrize("confstr", [_unknown, lambda name: None])
def test_another_library_is_not_taken_for_glibc(confstr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", confstr)
    reads._library.cache_clear()
    try:
        assert isinstance(reads_for(2, 2), ThreadReads)
        with pytest.raises(OSError, match="no POSIX AIO"):
            NativeReads(1, 1)
    finally:
        reads._library.cache_clear()


def test_the_layout_is_that_of_glibc() -> None:
    """Size and places from ``<bits/types/struct_aiocb.h>``, the same on x86_64 and aarch64."""
    control = reads._Control
    assert ctypes.sizeof(control) == 168 and ctypes.sizeof(reads._Options) == 32
    places = {name: getattr(control, name).offset for name in ("buf", "nbytes", "sigev_notify", "offset")}
    assert places == {"buf": 16, "nbytes": 24, "sigev_notify": 44, "offset": 128}


def test_no_more_go_on_than_there_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc takes the number of threads once; with fewer wanted later, no more reads are begun than may go on."""
    library = reads._Library.__new__(reads._Library)
    asked: list[int] = []
    library._init, library._threads = lambda options: asked.append(options._obj.threads), 0
    assert [library.threads(wanted) for wanted in (8, 16, 4)] == [8, 8, 8] and asked == [8]
    for threads, ahead in ((8, 20), (16, 20), (4, 4)):
        monkeypatch.setattr(library, "threads", lambda wanted: 8)
        monkeypatch.setattr(reads, "_library", lambda: library)
        assert NativeReads(20, threads).ahead == ahead


def test_bytes_from_where_they_were_asked(some: Reads, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"abcdefghij")
    first, second = (os.open(tmp_path / name, os.O_RDONLY) for name in "ab")
    for _ in range(2):
        assert read(some, 0, first, 3, 4) == (3, b"456")
        assert read(some, 0, second, 4, 1) == (4, b"bcde")  # the slot goes from file to file
        assert read(some, 3, first, 4, 8) == (2, b"89\xff\xff")
        assert read(some, 3, first, 4, 10)[0] == 0
    os.close(first)
    os.close(second)


def test_a_read_that_cannot_be_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc has no memory or no thread for it."""
    if NativeReads not in KINDS:
        pytest.skip("no glibc")
    made = NativeReads(2, 2)

    def no_room(control: Any) -> int:
        ctypes.set_errno(11)
        return -1

    monkeypatch.setattr(made._library, "read", no_room)
    fd = os.open("/dev/zero", os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        made.start(0, fd, torch.empty(8, dtype=torch.uint8), 0)
    made.close()
    os.close(fd)


def test_copies_of_descriptors_are_made_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each closes the one before, which some network file systems answer with a round trip; none is inherited."""
    if NativeReads not in KINDS:
        pytest.skip("no glibc")
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"abcdefghij")
    first, second = (os.open(tmp_path / name, os.O_RDONLY) for name in "ab")
    copies: list[int] = []
    real = os.dup2
    monkeypatch.setattr(os, "dup2", lambda fd, *rest, **more: copies.append(fd) or real(fd, *rest, **more))
    made = NativeReads(2, 2)
    for fd, expected in ((first, b"012"), (first, b"012"), (second, b"abc"), (second, b"abc"), (first, b"012")):
        assert read(made, 0, fd, 3, 0) == (3, expected)
        assert not os.get_inheritable(made._files[0])
    assert copies == [second, first]
    made.close()
    os.close(first)
    os.close(second)


def test_an_error_has_its_number(some: Reads, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        read(some, 1, fd, 4, 0)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        read(some, 2, fd, 4, 0)


def test_waiting_ends_in_time_or_with_the_read(some: Reads) -> None:
    file = os.open("/dev/zero", os.O_RDONLY)
    some.start(0, file, torch.empty(1 << 30, dtype=torch.uint8), 0)
    before = time.monotonic()
    some.wait([0], 0.01)
    assert time.monotonic() - before < 5 and some.done(0) is None
    some.wait([0], 100)
    got = some.done(0)
    assert got is not None and got > 0
    os.close(file)


def _one_file_twice(kind: type[Any], results: Any) -> None:
    made = kind(2, 2)
    file = os.open("/dev/zero", os.O_RDONLY)
    made.start(0, file, torch.empty(1 << 30, dtype=torch.uint8), 0)
    small = read(made, 1, file, 4096, 0)[0]
    results.put((small, made.done(0)))
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_reads_of_one_file_go_on_at_the_same_time(kind: type[Any]) -> None:
    """Reads of one descriptor would wait for one another. In a process of its own, where glibc has two threads."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=_one_file_twice, args=(kind, results), daemon=True)
    child.start()
    assert results.get(timeout=60) == (4096, None)
    child.join(60)


def test_close_waits_for_what_goes_on(some: Reads) -> None:
    file = os.open("/dev/zero", os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    big = torch.full((1 << 28,), 0xFF, dtype=torch.uint8)
    some.start(0, file, big, 0)
    some.close()
    assert some.done(0) == big.numel() and not big.any()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(file)


def _in_child(file: str, results: Any) -> None:
    made = reads_for(2, 2)
    fd = os.open(file, os.O_RDONLY)
    results.put((type(made).__name__, read(made, 0, fd, 3, 0)))


@pytest.mark.parametrize("used", [True, False])
def test_after_a_fork(used: bool, tmp_path: Path) -> None:
    """A fork leaves out the threads of glibc, which does not notice: a child of a process with them would hang."""
    (tmp_path / "a").write_bytes(b"0123456789")
    if used:
        fd = os.open(tmp_path / "a", os.O_RDONLY)
        read(reads_for(2, 2), 0, fd, 3, 0)
        os.close(fd)
    context = multiprocessing.get_context("fork" if used else "spawn")
    results = context.Queue()
    child = context.Process(target=_in_child, args=(str(tmp_path / "a"), results), daemon=True)
    child.start()
    name, got = results.get(timeout=60)
    child.join(60)
    assert got == (3, b"012")
    assert name == ("ThreadReads" if used or len(KINDS) == 1 else "NativeReads")
