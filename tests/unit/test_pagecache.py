"""What the kernel holds of a file. The real page cache; on file systems that live in memory there is nothing to see."""

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_lora_reload import pagecache
from vllm_lora_reload.pagecache import PageCache, bring_in

SIZE = 33_000_001
BLOCK = pagecache._BLOCK


@contextmanager
def pages_of(path: Path) -> Iterator[PageCache]:
    fd = os.open(path, os.O_RDONLY)
    pages = PageCache(fd)
    os.close(fd)  # it has its own
    try:
        yield pages
    finally:
        pages.close()


def read(path: Path, nbytes: int) -> None:
    """So many bytes and none ahead of them."""
    with path.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert len(opened.read(nbytes)) == nbytes


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """None of it is in memory."""
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    drop(path)
    with pages_of(path) as pages:
        if pages.share() > 0:
            pytest.skip("this file system keeps its files in memory, or does not tell")
    return path


def test_asking_brings_nothing_there(file: Path) -> None:
    for _ in range(3):
        with pages_of(file) as pages:
            assert pages.share() == 0
            assert not pages.has(0, BLOCK) and not pages.has(SIZE - 1, SIZE)


def test_what_has_been_read_is_there(file: Path) -> None:
    read(file, 2 * BLOCK)
    with pages_of(file) as pages:
        assert pages.has(0, BLOCK) and pages.has(100, 2 * BLOCK)
        assert not pages.has(BLOCK, 3 * BLOCK) and not pages.has(3 * BLOCK, 4 * BLOCK)
        assert 0.1 < pages.share() < 0.5
    file.read_bytes()
    with pages_of(file) as pages:
        assert pages.share() == 1 and pages.has(0, SIZE) and pages.has(SIZE - 1, SIZE + BLOCK)


def test_a_file_that_shrinks_while_it_is_looked_at(file: Path) -> None:
    """No page of the mapping is touched, which would end the process."""
    with pages_of(file) as pages:
        os.truncate(file, 10)
        assert not pages.has(BLOCK, 2 * BLOCK)


@pytest.mark.parametrize("problem", ["empty", "no mincore", "no mapping", "refused"])
def test_where_nothing_can_be_known(problem: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as being there."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError

    class Libc:
        if problem == "refused":

            @staticmethod
            def mincore(*args: Any) -> int:
                return -1

    if problem == "empty":
        file.write_bytes(b"")
    elif problem == "no mapping":
        monkeypatch.setattr(mmap, "mmap", refuse)
    else:
        monkeypatch.setattr(pagecache, "_libc", Libc)
    with pages_of(file) as pages:
        assert pages.share() == 1 and pages.has(0, SIZE)


@pytest.mark.parametrize(("free", "comes"), [(4 * SIZE, True), (SIZE, False)])
def test_what_has_room_is_brought_in(free: int, comes: bool, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagecache, "available_memory", lambda: free)
    bring_in([file], threading.Event())
    with pages_of(file) as pages:
        assert pages.has(0, SIZE) is comes


def test_only_what_is_missing_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, so that it is active memory; and only that needs room."""
    read(file, 6 * BLOCK)
    got: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, start: got.append(start) or real(fd, buffers, start))
    monkeypatch.setattr(pagecache, "available_memory", lambda: SIZE)
    bring_in([file], threading.Event())
    assert got == [6 * BLOCK, 6 * BLOCK, 7 * BLOCK, 7 * BLOCK]
    with pages_of(file) as pages:
        assert pages.share() == 1


def test_it_can_be_given_up(file: Path) -> None:
    class Third:
        """An event that is set when it is asked for the third time."""

        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 2

    bring_in([file], Third())  # type: ignore[arg-type]
    with pages_of(file) as pages:
        assert pages.has(0, 2 * BLOCK) and not pages.has(4 * BLOCK, 8 * BLOCK)


def test_a_file_that_is_gone_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bring_in([tmp_path / "gone"], threading.Event())
    assert "reading it when it is needed may be slow" in caplog.text
