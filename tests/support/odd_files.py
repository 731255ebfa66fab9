"""Things that stand where a file should be, and a way to see that nobody waits for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def in_time(action: Callable[[], T], seconds: float = 10) -> T:
    """What an action returns or raises.

    Raises:
        TimeoutError: it waits; its thread is left behind.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, action()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"it still waits after {seconds} s")
    well, result = outcome[0]
    if not well:
        raise result
    return result  # type: ignore[no-any-return]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    """With something in it, which nobody is to lose."""
    path.mkdir()
    (path / "precious").write_text("precious")


def link(path: Path) -> None:
    """To a file beside the folder, which is not there."""
    path.symlink_to(path.parent.parent / "elsewhere")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


def deep(path: Path) -> None:
    path.write_text("[" * 200_000)


def half_a_pair(path: Path) -> None:
    path.write_text('{"format": 1, "engine": {"\\udc00": 1}}')


def not_utf8(path: Path) -> None:
    path.write_bytes(b'{"format": "\xff"}')


def many_digits(path: Path) -> None:
    path.write_text('{"format": ' + "9" * 10_000 + "}")


KINDS = (fifo, folder, link, sparse, deep, half_a_pair, not_utf8, many_digits)
