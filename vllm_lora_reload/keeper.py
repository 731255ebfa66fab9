"""When a snapshot is written, whether it still holds what the engine has, and when it comes back.

The thread that writes is held up at a *gate* while memory is unmapped or a load runs; after each such time it makes
sure by digest that nothing has changed, else it begins anew. So a file never mixes two versions of the weights.

      after start-up --no snapshot fits--> written in the background --done--> valid
                     --one fits----------------------------------------------> valid
      valid --weights have other digests at sleep(2)--> not used; the weights have to be loaded
            --they have the same----------------------> restored at wake-up
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from .errors import SnapshotError
from .ring import Ring
from .snapshot import Engine, Lock, Snapshot, Storage, digests_of, listed, write

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say

_SETTLED = 1.0  # seconds without a load, before weights that came tensor by tensor are written
_PATIENCE = 5.0  # seconds that a request for a snapshot waits for another engine that is writing it
_SAMPLE = 16  # one of so many tensors is verified


class _Cancelled(Exception):
    """The writer is to stop."""


class _Changed(Exception):
    """Weights have changed while they were written."""


class SnapshotKeeper:
    """One worker's snapshot.

    Args:
        folder: the setting ``snapshot_dir``.
        engine: what snapshots here belong to.
        when: the setting ``snapshot``.
        verify: the setting ``verify``.
        ring: reads the file.
        storages: gives the base tensors as they are now.
        device: where they are.

    Attributes:
        snapshot: the one that held what was in memory when it was last looked at.
        reason: why there is none, in words; None while one is being written.
    """

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        when: Literal["once", "always", "never"],
        verify: Literal["off", "sample", "full"],
        ring: Ring,
        storages: Callable[[], list[Storage]],
        device: torch.device,
    ) -> None:
        self._path = engine.folder(folder) / f"{engine.rank}.json"
        self._engine = engine
        self._when = when
        self._verify = verify
        self._ring = ring
        self._storages = storages
        self._device = device
        self.snapshot: Snapshot | None = None
        self.reason: str | None = "the engine has not finished starting"
        self.seconds: float | None = None  # that writing it took
        self.writing = False
        self._first: list[str] = []
        self._lost: list[Storage] = []  # since the last sleep
        self._usable = False
        self._writes = False  # and not only looks
        self._waits = False  # for another engine
        self._again = False  # one is to be written after the next load
        self._gate = threading.Lock()
        self._held = False
        self._generation = 0  # counts how often it was
        self._loaded = 0.0  # time of the last load
        self._thread: threading.Thread | None = None
        self._cancel = threading.Event()
        self._turns = 0

    def started(self) -> None:
        """The engine is ready to serve: take the snapshot that fits, or begin to write one.

        vLLM warms up again when it scales; what was loaded at start-up is then no longer what memory holds.
        """
        if self._first:
            return
        try:
            self._look()
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
            logger.exception("There will be no snapshot; weights have to be loaded after sleep(level=2)")

    def _look(self) -> None:
        found = self._storages()
        self._first = digests_of(found)
        try:
            self._take_up(Snapshot.find(self._path, self._engine, found, self._first))
        except SnapshotError as error:
            self.reason = str(error) if self._path.exists() else "none has been written"
            if self._path.exists():
                logger.warning("Snapshot: %s", error)
        if self.snapshot is None and self._when == "never":
            return
        self._ring.prepare()
        self._start(write=True)

    def _take_up(self, snapshot: Snapshot) -> None:
        self.snapshot, self.reason = snapshot, None
        logger.info("Snapshot of the base weights: %s", snapshot.file)

    # --- Writing --------------------------------------------------------------------------------------------------

    def _start(self, write: bool) -> None:
        """Let a thread look for a snapshot of what is in memory now, and `write` one if there is none."""
        self._cancel.set()  # an earlier thread ends when it next comes to the gate
        self._cancel = threading.Event()
        self.writing = True
        if self._thread is None:
            atexit.register(self.close)  # a thread that the interpreter's end meets in torch aborts the process
        thread = threading.Thread(
            target=self._run, args=(self._cancel, write), name="lora-reload-snapshot", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            self.writing, self.reason = False, str(error)
            logger.warning("Snapshot: %s", error)
        else:
            self._thread = thread

    def close(self) -> None:
        """The engine shuts down."""
        self._cancel.set()
        self.release(True)
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.close)

    def hold(self) -> None:
        """From now on memory may change or go; returns when the writer has stopped reading it."""
        if not self._held:
            self._gate.acquire()
            self._held = True
            self._generation += 1
            self._usable, self._lost = False, []

    def release(self, complete: bool) -> None:
        """Undo `hold`, if base weights are `complete`."""
        if self._held and complete:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self._held = False
            self._gate.release()

    def loaded(self) -> None:
        """A load has ended well. Look for a snapshot of what it brought, when no other load follows.

        One is written where every version is to have one, or where the one that there was is damaged.
        """
        self._loaded = time.monotonic()
        if self._first and not self.writing and (self.snapshot is None or self._when == "always"):
            self._start(write=self._when == "always" or self._again)
            self._again = False

    def take(self) -> dict[str, Any]:
        """Have a snapshot of what is in memory now, and wait until it is on the disk. See `state`."""
        if self._held:
            return self.state() | {"reason": "base weights are missing or asleep"}
        self._loaded = 0.0
        if not self.writing or not self._writes:
            self._start(write=True)
        since = time.monotonic()
        while self.writing:
            if not self._waits:
                since = time.monotonic()
            elif time.monotonic() - since > _PATIENCE:
                return self.state() | {"reason": "another engine is writing it, and may be asleep"}
            time.sleep(0.01)
        return self.state()

    def state(self) -> dict[str, Any]:
        """``state`` (``valid``, ``writing``, ``none``), ``path``, ``bytes``, ``seconds`` of writing, ``reason``."""
        snapshot = self.snapshot
        return {
            "state": "valid" if snapshot else "writing" if self.writing else "none",
            "path": str(snapshot.file if snapshot else self._path),
            "bytes": snapshot.manifest.size if snapshot else 0,
            "seconds": self.seconds,
            "reason": self.reason,
        }

    def _run(self, cancel: threading.Event, write: bool) -> None:
        try:
            stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
            on_device: AbstractContextManager[Any] = torch.cuda.device(self._device) if stream else nullcontext()
            with torch.no_grad(), on_device, torch.cuda.stream(stream) if stream else nullcontext():
                while self.writing:
                    try:
                        self._keep(cancel, write)
                    except _Changed:
                        if self._when != "always":
                            raise SnapshotError("the weights were changed while they were written") from None
        except _Cancelled:
            pass
        except Exception as error:
            if not cancel.is_set():
                self.snapshot, self.writing = None, False
                self.reason = f"it could not be written: {type(error).__name__}: {error}"
                logger.exception("The snapshot could not be written; weights have to be loaded after sleep(level=2)")
        else:
            if (snapshot := self.snapshot) is not None:  # it may have gone meanwhile
                self._ring.warm([snapshot.file])

    def _keep(self, cancel: threading.Event, may_write: bool) -> None:
        self._writes = may_write
        while (rest := self._loaded + _SETTLED - time.monotonic()) > 0:
            if cancel.wait(rest):
                raise _Cancelled
        with self._reading(cancel):
            generation, found = self._generation, self._storages()
            current = digests_of(found)
            mine = self.snapshot
            if mine is not None and mine.manifest.digests() == current and (mine.in_place or not may_write):
                self.writing = False
                return

        @contextmanager
        def reading() -> Iterator[None]:
            nonlocal generation
            with self._reading(cancel):
                if self._generation != generation:
                    if digests_of(self._storages()) != current:
                        raise _Changed
                    generation = self._generation
                yield

        with self._locked(cancel, may_write):
            start = time.perf_counter()
            try:
                snapshot = Snapshot.find(self._path, self._engine, found, current)
            except SnapshotError:
                if not may_write:
                    self.writing = False
                    return
                snapshot = write(self._path, self._engine, found, current, reading)
                self.seconds = time.perf_counter() - start
            with reading():
                self._take_up(snapshot)
                self.writing = False

    @contextmanager
    def _locked(self, cancel: threading.Event, may_write: bool) -> Iterator[None]:
        """No other engine writes meanwhile. To look only, nobody has to wait."""
        if not may_write:
            yield
            return
        lock = Lock(self._path)
        self._waits = True
        try:
            while not lock.take():
                if cancel.wait(0.2):
                    raise _Cancelled
        finally:
            self._waits = False
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _reading(self, cancel: threading.Event) -> Iterator[None]:
        """Device memory may be read in this block."""
        with self._gate:
            if cancel.is_set():
                raise _Cancelled
            yield

    # --- Sleep and wake-up ----------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Before level 2 takes the weights: see whether the snapshot has their bytes.

        Only tensors that a load brings count. Others (running statistics, scales) may have changed; they are kept on
        the host over the sleep, as without a snapshot.
        """
        self._usable, self._lost = False, []
        if self.snapshot is None:
            return
        found = self._storages()
        if reason := self.snapshot.manifest.misfits(found):
            self.snapshot, self.reason = None, reason
            return
        current = digests_of(found)
        if differing := self.snapshot.manifest.differing(current):
            self.snapshot = None
            self.reason = f"other weights were loaded since it was written: {listed(differing)} differ"
            logger.info("Snapshot: not used after this sleep: %s", self.reason)
            return
        self._usable, self._lost = True, found

    @property
    def usable(self) -> bool:
        """Whether the snapshot has what the last level 2 took."""
        return self._usable

    @property
    def of_checkpoint(self) -> bool:
        """Whether the snapshot has what was loaded at start-up."""
        return self.snapshot is not None and self.snapshot.manifest.digests() == self._first

    def restore(self) -> dict[str, Any]:
        """Bring back what the last level 2 took.

        Returns:
            ``source``, ``bytes``, ``seconds``, ``verify_seconds``.

        Raises:
            Exception: it could not be done; memory holds nothing of use.
        """
        assert self.snapshot is not None
        start = time.perf_counter()
        try:
            nbytes = self.snapshot.restore(self._lost, self._ring)
            read = time.perf_counter()
            if self._verify != "off":
                every = 1 if self._verify == "full" else _SAMPLE
                self._turns += 1
                self.snapshot.check(self._lost, every, self._turns % every)
        except BaseException as error:
            snapshot, self.snapshot = self.snapshot, None
            self.reason = f"{type(error).__name__}: {error}"
            if isinstance(error, SnapshotError):
                self._again = self._when != "never"
                snapshot.forget()
            raise
        finally:
            self._usable, self._lost = False, []
        end = time.perf_counter()
        return {"source": "snapshot", "bytes": nbytes, "seconds": end - start, "verify_seconds": end - read}

    def holds(self) -> bool:
        """Whether memory has now, byte for byte, what was loaded at start-up and is in the snapshot."""
        return self.of_checkpoint and digests_of(self._storages()) == self._first
