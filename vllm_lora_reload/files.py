"""Files and folders that others may have put there, opened so that nothing waits, nothing large is read, nothing is
written or removed elsewhere.

- A FIFO, a device or a folder where a file should be is an error, at once.
- In a `Folder` of this package no link is followed, and it belongs to this user alone. Only regular files are removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

JSON_LIMIT = 64 << 20  # bytes; a manifest of a hundred thousand tensors has less


def descriptor(path: str | Path, follow: bool = True, folder: int | None = None) -> int:
    """Open a regular file for reading.

    Args:
        path: of it.
        follow: whether it may be a link.
        folder: descriptor of the folder that `path` is relative to.

    Raises:
        OSError: it cannot be opened, or is something else.
        ValueError: no file can have such a name.
    """
    # Whatever it is, this does not open it yet: to open a FIFO may wait, and some devices do something.
    found = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(found)


def open_regular(path: Path) -> IO[bytes]:
    """A regular file, or what a link leads to, opened for reading. See `descriptor`."""
    return open(path, "rb", buffering=0, opener=lambda *_: descriptor(path))


def ensure_plain(folder: Path, names: Iterable[str]) -> None:
    """For somebody who opens files without looking.

    Raises:
        OSError: one is there and is no regular file.
        ValueError: one is JSON, and too large.
    """
    for name in names:
        try:
            status = (folder / name).stat()
        except (OSError, ValueError):  # not there, or not any more
            continue
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(folder / name))
        if name.endswith(".json") and status.st_size > JSON_LIMIT:
            raise ValueError(f"{folder / name}: {status.st_size} bytes are too many")


def parse_json(opened: IO[bytes]) -> Any:
    """Content of a JSON file in UTF-8.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, nested too deeply, or damaged.
    """
    if (size := os.fstat(opened.fileno()).st_size) > JSON_LIMIT:
        raise ValueError(f"{size} bytes are too many")
    content = bytearray()
    while len(content) <= JSON_LIMIT and (more := opened.read(JSON_LIMIT + 1 - len(content))):
        content += more
    if len(content) > JSON_LIMIT:
        raise ValueError(f"more than {JSON_LIMIT} bytes are too many")
    text = content.decode("utf-8")
    try:
        found = json.loads(text)
        if "\\ud" in text.lower():  # half a pair would be an error wherever it is printed or sent
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def read_json(path: Path) -> Any:
    """`parse_json` of the file at `path`."""
    with open_regular(path) as opened:
        return parse_json(opened)


class Folder:
    """A folder of this package, held open: what its names mean cannot be turned elsewhere.

    Args:
        path: of it. Folders above may be links, itself not.
        create: make it if it is not there, and take from others the right to write to it if it is this user's.

    Raises:
        OSError: it is not there, is something else, belongs to another user, or others may write to it.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        self.path = path
        if create:
            for each in (path.parent, path):
                with contextlib.suppress(FileExistsError):
                    each.mkdir(mode=0o700, parents=True)
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError as error:
            raise NotADirectoryError(error.errno, "not a folder, or a link, which is not followed", str(path)) from None
        try:
            status = os.fstat(self.fd)
            if create and status.st_uid == os.geteuid() and status.st_mode & 0o022:
                os.fchmod(self.fd, 0o700)
            ensure_ours(self.fd, path)
        except BaseException:
            os.close(self.fd)
            raise

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def open(self, name: str) -> IO[bytes]:
        """A file of this user's, for reading.

        Raises:
            OSError: it is not there, is no regular file, or another user may have written to it.
        """

        def found(*_: object) -> int:
            return descriptor(name, False, self.fd)

        opened = open(self.path / name, "rb", buffering=0, opener=found)  # noqa: SIM115 - the caller closes it
        try:
            ensure_ours(opened.fileno(), self.path / name)
        except BaseException:
            opened.close()
            raise
        return opened

    def create(self, name: str, anew: bool = True) -> int:
        """Descriptor of a file to write to, which is not there yet if it is to be made `anew`.

        Raises:
            OSError: it cannot be made, or is no regular file.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_EXCL if anew else 0)
        fd = os.open(name, flags, 0o600, dir_fd=self.fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(self.path / name))
        return fd

    def status(self, name: str) -> os.stat_result | None:
        """Of a name, not of what a link leads to; None if there is none."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        return sorted(os.listdir(self.fd))

    def remove(self, name: str) -> None:
        """Remove a regular file; leave anything else."""
        if (found := self.status(name)) is not None and stat.S_ISREG(found.st_mode):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def make_way(self, name: str) -> None:
        """Give what has a name and is no regular file another name: it is not this package's, and not to be lost."""
        if (found := self.status(name)) is not None and not stat.S_ISREG(found.st_mode):
            other = f".{name}.{secrets.token_hex(4)}.aside"
            os.rename(name, other, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            logger.warning("%s is no file and was renamed to %s", self.path / name, other)

    @contextmanager
    def replacing(self, name: str) -> Iterator[str]:
        """A name to write to; renamed to `name` at the end, removed after an error."""
        part = f".{name}.{secrets.token_hex(4)}.part"
        try:
            yield part
            self.make_way(name)
            os.replace(part, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            os.fsync(self.fd)
        except BaseException:
            self.remove(part)
            raise


def ensure_ours(fd: int, path: Path) -> None:
    """Whoever can write to a snapshot decides what the engine answers.

    Raises:
        PermissionError: what is open belongs neither to this process's user nor to root, or others may write to it.
    """
    found, user = os.fstat(fd), os.geteuid()
    if found.st_uid not in (user, 0):
        reason = f"it belongs to user {found.st_uid}, and this process runs as user {user}"
        raise PermissionError(errno.EPERM, reason, str(path))
    if found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "other users may write to it", str(path))
