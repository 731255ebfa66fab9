"""Files into memory. The device is the CPU; tests/gpu runs the same on a GPU."""

import errno
import fcntl
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import odd_files
from tests.support.odd_files import in_time
from vllm_lora_reload import reads
from vllm_lora_reload import ring as ring_module
from vllm_lora_reload.ring import PAGE, EndOfFileError, Piece, Ring, threads_for

CPU = torch.device("cpu")
SIZE = 9_000_001  # several chunks of 1 MiB, not a multiple of anything


@pytest.fixture(scope="module")
def content() -> torch.Tensor:
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def file(content: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ring") / "weights"
    path.write_bytes(content.numpy().tobytes())
    return path


@pytest.fixture(params=["native", "threads"])
def kind(request: Any, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """What reads for the ring, here whatever the machine would choose."""
    if request.param == "native" and reads._library() is None:
        pytest.skip("no glibc")
    made = reads.ThreadReads if request.param == "threads" else reads.NativeReads
    monkeypatch.setattr(ring_module, "reads_for", made)
    return made


@pytest.fixture(params=["buffered", "direct", "auto"])
def ring(kind: type[Any], request: Any) -> Iterator[Ring]:
    ring = Ring(CPU, threads=3, chunk=1 << 20, reader=request.param)
    yield ring
    ring.close()


def test_bytes_of_many_pieces(ring: Ring, file: Path, content: torch.Tensor) -> None:
    """In any order, across chunks, in gaps, twice, at odd offsets, up to the last byte."""
    places = [(5_000_003, SIZE - 5_000_003), (0, 1), (1, 3_333_333), (7, 10), (4_000_000, PAGE), (SIZE, 0)]
    targets = [torch.full((size,), 0xFF, dtype=torch.uint8) for _, size in places]
    for _ in range(2):  # buffers are used again
        ring.read({file: [Piece(offset, target) for (offset, _), target in zip(places, targets, strict=True)]})
        for (offset, size), target in zip(places, targets, strict=True):
            assert torch.equal(target, content[offset : offset + size])
            target.fill_(0xFF)


def test_targets_of_any_type(ring: Ring, file: Path, content: torch.Tensor) -> None:
    target = torch.empty(100, 3, dtype=torch.bfloat16)
    ring.read({file: [Piece(11, target)]})
    assert torch.equal(target.view(-1).view(torch.uint8), content[11:611])


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    pad=st.lists(st.integers(0, 3000), min_size=3, max_size=3),
    offset=st.integers(0, 5000),
    transposed=st.booleans(),
    wide=st.booleans(),
)
def test_elements_that_lie_apart(
    file: Path, content: torch.Tensor, shape: list[int], pad: list[int], offset: int, transposed: bool, wide: bool
) -> None:
    """A slice of columns, a transposed matrix and the like; also converted to another type."""
    stride, step = [], 1
    for size, more in zip(reversed(shape), pad, strict=False):
        stride.insert(0, step)
        step = size * step + more
    if transposed:
        shape, stride = shape[::-1], stride[::-1]
    dtype = torch.int16
    needed = (sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1) * 2
    if offset + needed > SIZE:
        return
    source = content[offset : offset + needed].clone().view(dtype).as_strided(shape, stride)
    target = torch.zeros([*shape[:-1], 2 * shape[-1]], dtype=torch.int64 if wide else dtype)[..., ::2]
    ring = Ring(CPU, threads=2, chunk=2 * PAGE)
    ring.read({file: [Piece(offset, target, tuple(stride), dtype)]})
    ring.close()
    assert torch.equal(target, source.to(target.dtype))


def test_several_files(ring: Ring, file: Path, content: torch.Tensor, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"abc")
    first, second = torch.empty(10, dtype=torch.uint8), torch.empty(2, dtype=torch.uint8)
    ring.read({file: [Piece(1, first)], other: [Piece(1, second)]})
    assert torch.equal(first, content[1:11]) and bytes(second.tolist()) == b"bc"


def test_a_file_that_is_too_short(ring: Ring, file: Path) -> None:
    """As if somebody had truncated it: an error, not a dead process; and the ring goes on working."""
    with pytest.raises(OSError, match=rf"{file} ends at byte {SIZE}; {SIZE + 1} are needed"):
        ring.read({file: [Piece(0, torch.empty(SIZE + 1, dtype=torch.uint8))]})
    target = torch.empty(4, dtype=torch.uint8)
    ring.read({file: [Piece(0, target)]})


def test_an_error_of_the_disk(kind: type[Any], ring: Ring, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kind.start
    monkeypatch.setattr(kind, "start", lambda self, slot, fd, *rest: real(self, slot, broken, *rest))
    broken = os.open(file, os.O_WRONLY)  # the system answers with EBADF to reads of it
    with pytest.raises(OSError, match=rf"Bad file descriptor at byte 0: .*{file.name}") as caught:
        ring.read({file: [Piece(0, torch.empty(9, dtype=torch.uint8))]})
    os.close(broken)
    assert caught.value.errno == errno.EBADF


def test_after_an_error_no_read_begins_and_none_goes_on(
    kind: type[Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers may be used again, and descriptors are closed, when the error comes."""
    begun: list[int] = []
    started, closed = kind.start, kind.close
    broken = os.open(file, os.O_WRONLY)

    def start(self: Any, slot: int, fd: int, buffer: torch.Tensor, at: int) -> None:
        begun.append(slot)
        started(self, slot, broken if at == 0 else fd, buffer, at)

    def close(self: Any) -> None:
        before = list(begun)
        closed(self)
        assert begun == before and len(before) < SIZE // PAGE // 2
        results = []
        for slot in before:
            try:
                results.append(self.done(slot))
            except OSError:
                results.append(-1)
        assert None not in results and -1 in results

    monkeypatch.setattr(kind, "start", start)
    monkeypatch.setattr(kind, "close", close)
    ring = Ring(CPU, threads=4, chunk=PAGE, reader="buffered")
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        ring.read({file: [Piece(0, torch.empty(SIZE, dtype=torch.uint8))]})
    assert len(os.listdir("/proc/self/fd")) == open_before
    ring.close()
    os.close(broken)


def test_a_direct_read_that_ends_within_a_page(
    kind: type[Any], ring: Ring, file: Path, content: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is read from the beginning of that page, as direct reads must."""
    begun: list[int] = []
    start, done = kind.start, kind.done

    def started(self: Any, slot: int, fd: int, buffer: torch.Tensor, at: int) -> None:
        begun.append(at)
        start(self, slot, fd, buffer, at)

    def less(self: Any, slot: int) -> Any:
        got = done(self, slot)
        return got - 1000 if got is not None and got > PAGE else got

    monkeypatch.setattr(kind, "start", started)
    monkeypatch.setattr(kind, "done", less)
    target = torch.empty(3_000_000, dtype=torch.uint8)
    ring.read({file: [Piece(3, target)]})
    assert torch.equal(target, content[3:3_000_003])
    assert all(at % PAGE == 0 for at in begun) and len(begun) > 3


def test_an_interrupt_ends_the_read_and_then_frees_what_it_used(
    kind: type[Any], file: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    """Ctrl-C while reads do not end: as on a disk that hangs for a while."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a shell has none
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    before = len(os.listdir("/proc/self/fd"))
    hangs, closed = threading.Event(), threading.Event()
    done, close = kind.done, kind.close

    start = time.monotonic()

    def never(self: Any, slot: int) -> Any:
        hangs.set()
        return None if time.monotonic() - start < 10 else done(self, slot)

    def noted(self: Any) -> None:
        close(self)
        closed.set()

    monkeypatch.setattr(kind, "done", never)
    monkeypatch.setattr(kind, "close", noted)
    ring = Ring(CPU, threads=2, chunk=PAGE, reader="buffered")
    ring.prepare()
    main = threading.get_ident()
    threading.Thread(target=lambda: hangs.wait(10) and signal.pthread_kill(main, signal.SIGINT)).start()
    target = torch.empty(SIZE, dtype=torch.uint8)
    with pytest.raises(KeyboardInterrupt):
        ring.read({file: [Piece(0, target)]})
    assert closed.is_set() and time.monotonic() - start < 9
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(kind, "done", done)
    ring.read({file: [Piece(0, target)]})
    ring.close()


def test_an_interrupt_while_a_thread_starts_leaves_no_read_behind(
    kind: type[Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor does not know the thread yet, and would not wait for it."""
    begun, ended = threading.Event(), threading.Event()
    start, close, real = kind.start, kind.close, threading.Thread.start

    def started(self: Any, *args: Any) -> None:
        begun.set()
        start(self, *args)

    def slow(self: Any) -> None:
        time.sleep(0.5)
        close(self)
        ended.set()

    def interrupted(self: threading.Thread) -> None:
        real(self)
        if threading.current_thread() is threading.main_thread():
            begun.wait(0.2)
            raise KeyboardInterrupt

    monkeypatch.setattr(kind, "start", started)
    monkeypatch.setattr(kind, "close", slow)
    ring = Ring(CPU, threads=1, chunk=PAGE, reader="buffered")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", interrupted)
        ring.read({file: [Piece(0, torch.empty(9, dtype=torch.uint8))]})
    assert begun.is_set() is ended.is_set()
    ring.close()


def test_buffers_are_not_freed_under_a_read_that_was_left_behind(
    kind: type[Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a second Ctrl-C, which ends the waiting for the thread as well."""
    reading, may_end = threading.Event(), threading.Event()
    close = kind.close

    def slow(self: Any) -> None:
        reading.set()
        assert may_end.wait(10)
        close(self)

    monkeypatch.setattr(kind, "close", slow)
    ring = Ring(CPU, threads=2, chunk=PAGE, reader="buffered")
    ring.prepare()
    thread = threading.Thread(target=ring.read, args=({file: [Piece(0, torch.empty(9, dtype=torch.uint8))]},))
    thread.start()
    assert reading.wait(10)
    while ring._running is None:  # its thread may be ahead of the one that started it
        time.sleep(0.001)
    closing = threading.Thread(target=ring.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive() and ring.nbytes > 0
    may_end.set()
    closing.join(10)
    thread.join(10)
    assert ring.nbytes == 0


def test_a_read_that_is_ended_says_so(kind: type[Any], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the worker shuts down: its targets do not have all bytes."""
    reading = threading.Event()
    monkeypatch.setattr(kind, "done", lambda self, slot: reading.set())
    ring = Ring(CPU, threads=2, chunk=PAGE, reader="buffered")
    closing = threading.Thread(target=lambda: reading.wait(10) and ring.close())
    closing.start()
    with pytest.raises(RuntimeError, match="before all of it was there"):
        ring.read({file: [Piece(0, torch.empty(SIZE, dtype=torch.uint8))]})
    closing.join(10)
    assert ring.nbytes == 0


def test_an_open_file(ring: Ring, content: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has become of its name, by which errors call it; it stays open."""
    monkeypatch.setattr(ring, "warm", lambda paths: None)
    path, target = tmp_path / "weights", torch.empty(SIZE, dtype=torch.uint8)
    path.write_bytes(content.numpy().tobytes())
    with path.open("rb") as opened:
        path.unlink()
        ring.read({opened: [Piece(0, target)]})
        assert torch.equal(target, content)
        with pytest.raises(EndOfFileError, match=rf"{path} ends at byte {SIZE}"):
            ring.read({opened: [Piece(5, target)]})
        assert opened.read(5) == content[:5].numpy().tobytes()


@pytest.mark.parametrize("gone", ["the number", "the kernel's"])
def test_pinned_memory_without_huge_pages(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if gone == "the number":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)  # the kernel says EINVAL
    pinned = ring_module.Pinned(PAGE, CPU)
    pinned.memory.fill_(3)
    pinned.close()


def test_waiting_takes_little_of_the_processor(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    done = kind.done
    monkeypatch.setattr(kind, "done", lambda self, slot: asked.append(slot) or done(self, slot))
    ring = Ring(CPU, threads=1, chunk=1 << 27, reader="buffered")
    ring.read({Path("/dev/zero"): [Piece(0, torch.empty(1 << 27, dtype=torch.uint8))]})
    ring.close()
    assert 1 <= len(asked) < 3000  # some ten thousand a second, if it never waited


def test_a_library_among_what_is_mapped() -> None:
    maps = """7f00-7f01 r-xp 00000000 fe:00 12 /usr/lib/libc.so.6
7f02-7f03 r-xp 00000000 fe:00 13                         /opt/my tools/libcudart.so.12
7f04-7f05 rw-p 00000000 00:00 0
7f06-7f07 rw-p 00000000 00:00 0                          [stack]
"""
    assert ring_module._mapped("libcudart.so", maps) == "/opt/my tools/libcudart.so.12"
    assert ring_module._mapped("libother.so", maps) is None


def test_no_more_reads_are_begun_than_may_be(
    kind: type[Any], file: Path, content: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where glibc has more threads than this ring is to use, that is what keeps it to its number."""
    going_on: set[int] = set()
    most: list[int] = []
    made, start, done = kind.__init__, kind.start, kind.done

    def limited(self: Any, slots: int, threads: int) -> None:
        made(self, slots, threads)
        self.ahead = 2

    def started(self: Any, slot: int, *rest: Any) -> None:
        going_on.add(slot)
        most.append(len(going_on))
        start(self, slot, *rest)

    def ended(self: Any, slot: int) -> Any:
        got = done(self, slot)
        if got is not None:
            going_on.discard(slot)
        return got

    for name, method in (("__init__", limited), ("start", started), ("done", ended)):
        monkeypatch.setattr(kind, name, method)
    ring = Ring(CPU, threads=4, chunk=64 << 10, reader="buffered")
    target = torch.empty(SIZE, dtype=torch.uint8)
    ring.read({file: [Piece(0, target)]})
    ring.close()
    assert torch.equal(target, content) and max(most) == 2


def test_a_file_that_is_gone(ring: Ring, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ring.read({tmp_path / "gone": [Piece(0, torch.empty(9, dtype=torch.uint8))]})


def test_reads_that_bring_less_than_asked(
    kind: type[Any], ring: Ring, file: Path, content: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kind.start
    less = lambda self, slot, fd, buffer, at: real(self, slot, fd, buffer[:PAGE], at)  # noqa: E731
    monkeypatch.setattr(kind, "start", less)
    target = torch.empty(100_000, dtype=torch.uint8)
    ring.read({file: [Piece(3, target)]})
    assert torch.equal(target, content[3:100_003])


@pytest.mark.parametrize(
    ("max_bytes", "threads", "chunk", "expected"),
    [
        (512 << 20, 16, 0, (16, 4 << 20)),
        (64 << 20, 16, 0, (16, 2 << 20)),
        (8 << 20, 16, 0, (4, 1 << 20)),
        (512 << 20, 2, 4 << 20, (2, 4 << 20)),
        (16 << 20, 8, 4 << 20, (2, 4 << 20)),
    ],
)
def test_size(max_bytes: int, threads: int, chunk: int, expected: tuple[int, int]) -> None:
    ring = Ring(CPU, max_bytes, threads, chunk)
    assert (ring.threads, ring.chunk) == expected
    assert ring.nbytes == 0
    ring.prepare()
    assert ring.nbytes == 2 * ring.threads * ring.chunk <= max_bytes
    ring.close()
    assert ring.nbytes == 0


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    assert [threads_for(ranks) for ranks in (1, 2, 8, 64)] == [10, 8, 3, 1]
    assert [Ring(CPU, ranks=ranks).threads for ranks in (1, 2, 8, 64)] == [10, 8, 3, 1]
    assert Ring(CPU, threads=5, ranks=64).threads == 5


ALL = range(SIZE)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("reader", "cached", "through", "warmed"),
    [
        ("buffered", range(0), ALL, False),
        ("direct", ALL, range(0), False),
        ("direct", range(0), range(0), False),
        ("auto", ALL, ALL, False),
        ("auto", range(0), range(0), True),
        ("auto", range(3 * MIB), range(3 * MIB), True),  # and no disk for what is there
        ("auto", range(MIB, SIZE), range(MIB, SIZE), True),
        ("auto", range(3 * MIB + 5), range(3 * MIB), True),
    ],
)
def test_past_the_page_cache(
    kind: Any,
    reader: Any,
    cached: range,
    through: range,
    warmed: bool,
    file: Path,
    content: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not there is read past it, and brought there for the next time."""

    def share(fd: int, start: int, stop: int) -> float:
        return 1.0 if start in cached and stop - 1 in cached else 0.5

    direct: dict[int, bool] = {}
    warm: list[Path] = []
    start = kind.start

    def watched(reads: Any, slot: int, fd: int, buffer: torch.Tensor, offset: int) -> None:
        direct[offset] = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        start(reads, slot, fd, buffer, offset)

    monkeypatch.setattr(ring_module, "cached", share)
    monkeypatch.setattr(ring_module, "cached_of_file", lambda fd: share(fd, 0, SIZE))
    monkeypatch.setattr(kind, "start", watched)
    ring = Ring(CPU, threads=2, chunk=MIB, reader=reader)
    monkeypatch.setattr(ring, "warm", warm.extend)
    target = torch.empty(SIZE, dtype=torch.uint8)
    ring.read({file: [Piece(0, target)]})
    ring.close()
    assert torch.equal(target, content)
    assert direct == {offset: offset not in through for offset in range(0, SIZE, MIB)}
    assert warm == ([file] if warmed else [])


def test_only_chunks_that_are_wanted_are_asked_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "cached_of_file", lambda fd: 0.5)
    monkeypatch.setattr(ring_module, "cached", lambda fd, start, stop: float(stop <= 2 * MIB))
    ring = Ring(CPU, threads=2, chunk=MIB)
    monkeypatch.setattr(ring, "warm", lambda paths: pytest.fail("nothing was missing"))
    ring.read({file: [Piece(0, torch.empty(2 * MIB, dtype=torch.uint8))]})
    ring.close()


def test_a_file_system_that_does_not_tell(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks again for each chunk."""
    monkeypatch.setattr(ring_module, "cached_of_file", lambda fd: None)
    monkeypatch.setattr(ring_module, "cached", lambda fd, start, stop: pytest.fail("it is not known"))
    ring = Ring(CPU, threads=2, chunk=MIB)
    monkeypatch.setattr(ring, "warm", lambda paths: pytest.fail("it is not known"))
    ring.read({file: [Piece(0, torch.empty(2 * MIB, dtype=torch.uint8))]})
    ring.close()


@pytest.mark.parametrize(("reader", "most"), [("buffered", 1), ("direct", 2), ("auto", 2)])
def test_descriptors(
    reader: Any, most: int, file: Path, content: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a file, another where it is read past the page cache, and none is left."""
    monkeypatch.setattr(ring_module, "cached_of_file", lambda fd: 0.5)
    monkeypatch.setattr(ring_module, "cached", lambda fd, start, stop: 0.5)
    paths = [tmp_path / str(number) for number in range(20)]
    for path in paths:
        os.link(file, path) if path.parent.stat().st_dev == file.stat().st_dev else path.write_bytes(file.read_bytes())
    ring = Ring(CPU, threads=1, chunk=MIB, reader=reader)
    monkeypatch.setattr(ring, "warm", lambda paths: None)
    ring.prepare()
    before, open_now = set(os.listdir("/proc/self/fd")), 0
    real = ring._run

    def run(*args: Any) -> None:
        nonlocal open_now
        real(*args)
        open_now = len(set(os.listdir("/proc/self/fd")) - before)

    monkeypatch.setattr(ring, "_run", run)
    targets = [torch.empty(5, dtype=torch.uint8) for _ in paths]
    ring.read({path: [Piece(7, target)] for path, target in zip(paths, targets, strict=True)})
    assert (most - 0.5) * len(paths) < open_now < (most + 0.5) * len(paths)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # the listing's own
    assert all(torch.equal(target, content[7:12]) for target in targets)
    ring.close()


def test_a_file_that_is_replaced_while_it_is_read(
    file: Path, content: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes are of the file that was opened, also those that are read past the page cache."""
    path, other = tmp_path / "weights", tmp_path / "other"
    path.write_bytes(content.numpy().tobytes())
    other.write_bytes(bytes(SIZE))

    def replace(fd: int, start: int, stop: int) -> float:
        if other.exists():
            other.replace(path)
        return 0.0

    monkeypatch.setattr(ring_module, "cached_of_file", lambda fd: 0.5)
    monkeypatch.setattr(ring_module, "cached", replace)
    ring = Ring(CPU, threads=1, chunk=MIB)
    monkeypatch.setattr(ring, "warm", lambda paths: None)
    target = torch.empty(SIZE, dtype=torch.uint8)
    ring.read({path: [Piece(0, target)]})
    ring.close()
    assert torch.equal(target, content)
    assert not other.exists()


def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    odd_files.fifo(tmp_path / "file")
    ring = Ring(CPU, threads=1, chunk=MIB)
    with pytest.raises(OSError, match=r"Illegal seek|ends at byte 0"):
        in_time(lambda: ring.read({tmp_path / "file": [Piece(0, torch.empty(5000, dtype=torch.uint8))]}))
    ring.close()


def test_a_file_system_without_direct_reads(file: Path, content: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    refused: list[Any] = []

    def refuse(path: Any, flags: int) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "no direct reads here")
        return real(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(ring_module, "cached_of_file", lambda fd: 0.0)
    monkeypatch.setattr(ring_module, "cached", lambda fd, start, stop: 0.0)
    for reader in ("auto", "direct"):
        ring = Ring(CPU, threads=2, chunk=MIB, reader=reader)  # type: ignore[arg-type]
        monkeypatch.setattr(ring, "warm", lambda paths: pytest.fail("it has been read through the page cache"))
        target = torch.empty(SIZE, dtype=torch.uint8)
        ring.read({file: [Piece(0, target)]})
        ring.close()
        assert torch.equal(target, content)
    assert len(refused) == 2, "once is enough for a file"


def test_a_file_system_that_refuses_direct_reads_when_they_come(
    kind: type[Any], file: Path, content: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening for them went well."""
    start, done = kind.start, kind.done
    direct: dict[int, bool] = {}

    def started(self: Any, slot: int, fd: int, *rest: Any) -> None:
        direct[slot] = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        start(self, slot, fd, *rest)

    def ended(self: Any, slot: int) -> Any:
        got = done(self, slot)
        if got is not None and direct[slot]:
            refused.append(slot)
            raise OSError(errno.EINVAL, "not aligned")
        return got

    monkeypatch.setattr(kind, "start", started)
    monkeypatch.setattr(kind, "done", ended)
    monkeypatch.setattr(ring_module, "cached_of_file", lambda fd: 0.0)
    monkeypatch.setattr(ring_module, "cached", lambda fd, start, stop: 0.0)
    for reader in ("auto", "direct"):
        refused: list[int] = []
        ring = Ring(CPU, threads=2, chunk=MIB, reader=reader)  # type: ignore[arg-type]
        monkeypatch.setattr(ring, "warm", lambda paths: None)
        target = torch.empty(SIZE, dtype=torch.uint8)
        ring.read({file: [Piece(0, target)]})
        ring.close()
        assert torch.equal(target, content)
        assert 0 < len(refused) <= 4, "later chunks do not try"


def test_no_warming_beside_a_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(ring_module, "bring_in", lambda *args: given.append(args))
    ring = Ring(CPU, threads=1)
    real = ring._read

    def read(wanted: Any) -> Any:
        ring.warm([file])
        return real(wanted)

    monkeypatch.setattr(ring, "_read", read)
    ring.read({file: [Piece(0, torch.empty(9, dtype=torch.uint8))]})
    time.sleep(0.05)
    assert not given
    ring.close()


def test_a_read_does_not_fail_for_want_of_a_thread_to_warm_with(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ring_module, "cached_of_file", lambda fd: 0.0)
    monkeypatch.setattr(ring_module, "cached", lambda fd, start, stop: 0.0)
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if "warm" in self.name:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    ring = Ring(CPU, threads=1)
    ring.read({file: [Piece(0, torch.empty(9, dtype=torch.uint8))]})
    assert "not brought into the page cache: can't start new thread" in caplog.text
    ring.close()


def test_warming_ends_with_the_next_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(ring_module, "bring_in", lambda *args: given.append(args))
    ring = Ring(CPU, threads=1, ranks=3)
    ring.warm([file])
    while not given:
        pass
    paths, ends, ranks = given[0]
    assert paths == (file,) and ranks == 3 and not ends.is_set()
    ring.read({file: [Piece(0, torch.empty(9, dtype=torch.uint8))]})
    assert ends.is_set()
    ring.close()
