"""What the kernel holds of a file. The real page cache; on file systems that live in memory there is nothing to see."""

import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import drop_from_cache
from vllm_lora_reload import pagecache
from vllm_lora_reload.pagecache import available_memory, bring_in

BLOCK = pagecache._BLOCK
SIZE = 7 * BLOCK + 1001


def cached(path: Path, start: int = 0, stop: int = SIZE, samples: int = 500) -> float | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        return pagecache.cached(fd, start, stop, samples)
    finally:
        os.close(fd)


def read(path: Path, nbytes: int) -> None:
    """So many bytes and none ahead of them."""
    with path.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert len(opened.read(nbytes)) == nbytes


def make(path: Path) -> Path:
    """None of it is in memory."""
    path.write_bytes(os.urandom(SIZE))
    drop_from_cache(path)
    if cached(path, samples=20) != 0:  # these pages are there from now on
        pytest.skip("this file system keeps its files in memory, or does not tell")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make(tmp_path / "weights")


def test_asking_again_gives_the_same_answer(file: Path) -> None:
    """Though the kernel reads the pages that it was asked about."""
    fd = os.open(file, os.O_RDONLY)
    try:
        for _ in range(5):
            share = pagecache.cached_of_file(fd)
            assert share is not None and share < 0.25
            assert pagecache.cached(fd, 0, BLOCK) != 1
    finally:
        os.close(fd)


def test_what_has_been_read_is_there(file: Path) -> None:
    read(file, 2 * BLOCK)
    assert cached(file, 0, BLOCK) == cached(file, 100, 2 * BLOCK) == 1
    found = cached(file, BLOCK, 3 * BLOCK, 4)  # one of the first quarter, and so on
    assert found is not None and found >= 0.5
    assert cached(file, 3 * BLOCK, 4 * BLOCK, 4) != 1
    share = cached(file)
    assert share is not None and abs(share - 2 * BLOCK / SIZE) < 0.1
    file.read_bytes()
    assert cached(file) == cached(file, SIZE - 1, SIZE) == cached(file, SIZE - 1, SIZE + BLOCK) == 1


def watch(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """`answer` takes the offset of a byte that is asked for, and gives an error's number, 0 if it is there."""

    def read(fd: int, part: Any, count: int, offset: int, flags: int) -> int:
        assert (count, flags) == (1, os.RWF_NOWAIT)
        ctypes.set_errno(answer(offset))
        return -1 if ctypes.get_errno() else 1

    monkeypatch.setattr(pagecache, "_preadv2", lambda: read)


def test_every_page_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    watch(monkeypatch, lambda offset: asked.append(offset) or 0)
    for _ in range(200):
        pagecache.cached(0, 3 * 4096 + 5, 7 * 4096 + 1, 2)
    assert set(asked[::2]) == {3 * 4096, 4 * 4096, 5 * 4096}  # half of five pages
    assert set(asked[1::2]) == {5 * 4096, 6 * 4096, 7 * 4096}
    asked.clear()
    assert pagecache.cached(0, 4096, 4097, 8) == 1
    assert asked == [4096]


def test_without_flags_in_python(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in one that was built for a glibc before 2.26."""
    real = os.preadv
    monkeypatch.delattr(os, "RWF_NOWAIT")
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, buffers, offset))
    assert cached(file, 0, BLOCK, 4) != 1
    read(file, BLOCK)
    assert cached(file, 0, BLOCK) == 1
    bring_in([file], threading.Event())
    assert cached(file) == 1


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EINVAL, errno.EIO, None])
def test_where_nothing_can_be_known(error: int | None, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: libc does not have the call. Nothing is brought in either; what is wrong is said by who reads."""
    if error:
        watch(monkeypatch, lambda offset: error)
    else:
        monkeypatch.setattr(pagecache, "_preadv2", lambda: None)
    got: list[int] = []
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: got.append(offset))
    assert cached(file) is None
    bring_in([file], threading.Event())
    assert not got


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cached(tmp_path / "empty", 0, 0) == 1
    bring_in([tmp_path / "empty"], threading.Event())


@pytest.mark.parametrize(("free", "ranks", "comes"), [(4 * SIZE, 1, True), (SIZE, 1, False), (4 * SIZE, 4, False)])
def test_what_has_room_is_brought_in(
    free: int, ranks: int, comes: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagecache, "available_memory", lambda: free)
    bring_in([file], threading.Event(), ranks)
    share = cached(file)
    assert share is not None and (share == 1) is comes


def test_several_files_share_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has no room leaves it to the next."""
    first, second, third = (make(tmp_path / name) for name in "abc")
    read(third, 6 * BLOCK)
    monkeypatch.setattr(pagecache, "available_memory", lambda: 3 * SIZE)
    bring_in([first, second, third], threading.Event())
    shares = [cached(each) for each in (first, second, third)]
    assert shares[0] == shares[2] == 1
    assert shares[1] is not None and shares[1] < 0.5


def test_only_what_is_missing_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of which a part is missing too. Twice, so that it is active memory; and only that needs room."""
    read(file, 6 * BLOCK + 3 * BLOCK // 4)
    got: list[int] = []
    real = os.preadv

    def watched(fd: int, buffers: Any, offset: int) -> int:
        got.append(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    monkeypatch.setattr(pagecache, "available_memory", lambda: SIZE)
    bring_in([file], threading.Event())
    assert got == [6 * BLOCK, 6 * BLOCK, 7 * BLOCK, 7 * BLOCK]
    assert cached(file) == 1


def test_it_can_be_given_up(file: Path) -> None:
    class Third:
        """An event that is set when it is asked for the third time."""

        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 2

    bring_in([file], Third())  # type: ignore[arg-type]
    assert cached(file, 0, 2 * BLOCK) == 1
    share = cached(file)
    assert share is not None and share < 1


def test_a_file_that_is_gone_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bring_in([tmp_path / "gone"], threading.Event())
    assert f"{tmp_path / 'gone'}: " in caplog.text and "reading it when it is needed may be slow" in caplog.text


def test_free_memory_that_cannot_be_told_is_no_error(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> int:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(pagecache, "available_memory", refused)
    bring_in([file], threading.Event())
    assert "free memory: [Errno 13]" in caplog.text


# --- Memory -----------------------------------------------------------------------------------------------------


def test_memory_that_is_available() -> None:
    """Some, and no more than there is."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert whole // 1000 < available_memory() <= whole


@pytest.mark.parametrize(
    ("own", "above", "left"),
    [
        (("max", 0, 0), ("max", 0, 0), None),
        (("5000", 4500, 1000), ("max", 0, 0), 1200),  # the page cache of the group can be taken from it, but not shmem
        (("max", 0, 0), ("3000", 2900, 400), 200),
        (("5000", 4500, 300), ("3000", 2900, 300), 100),
        (("5000", 5500, 300), ("max", 0, 0), 0),
    ],
)
def test_a_control_group_has_less(
    own: Any, above: Any, left: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "pods" / "one"
    inner.mkdir(parents=True)
    for folder, (limit, current, file) in ((inner, own), (inner.parent, above)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon 1\nfile {file}\nshmem 300\nkernel 3\n")
    (tmp_path / "cgroup").write_text("4:memory:/other\n0::/pods/one\n")
    groups = pagecache._groups(tmp_path, tmp_path / "cgroup")
    assert groups == [inner, inner.parent, tmp_path]  # the root has no limit
    assert pagecache._groups(tmp_path, tmp_path / "none") == []
    monkeypatch.setattr(pagecache, "_groups", list)
    free = available_memory()
    monkeypatch.setattr(pagecache, "_groups", lambda: groups)
    assert available_memory() == left if left is not None else available_memory() > free // 2
