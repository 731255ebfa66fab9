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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
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


class _Gate:
    """Keeps the writer from memory that may change or go. Closed and opened by the worker's thread.

    Attributes:
        closings: how often it was closed: what is read before and after may be of two versions.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.closed = False
        self.closings = 0

    def close(self) -> None:
        """Returns when the writer is not in."""
        if not self.closed:
            self._lock.acquire()
            self.closed = True
            self.closings += 1

    def open(self) -> None:
        if self.closed:
            self.closed = False
            self._lock.release()

    @contextmanager
    def inside(self, job: _Job) -> Iterator[None]:
        """Device memory may be read in this block.

        Raises:
            _Cancelled: the job is to end.
        """
        with self._lock:
            job.proceed()
            yield


@dataclass
class _Job:
    """What the writer's thread does once. It sets `waits` and `done`, the worker's thread the rest.

    Attributes:
        write: a snapshot of what is in memory, if there is none; else it only looks for one.
        cancel: it is to end when it next comes to the gate, or to the next part of the file.
        waits: for another engine that is writing.
        done: the keeper knows what came of it. Set inside the gate, if all went well: a load that comes later finds it.
        thread: of it.
    """

    write: bool
    cancel: threading.Event = field(default_factory=threading.Event)
    waits: bool = False
    done: bool = False
    thread: threading.Thread | None = None

    def proceed(self) -> None:
        """Raises:
        _Cancelled: it is to end.
        """
        if self.cancel.is_set():
            raise _Cancelled


class SnapshotKeeper:
    """One worker's snapshot. The writer's thread changes `snapshot`, `reason` and `seconds`, and only inside the gate.

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
        self._first: list[str] = []  # digests of what was loaded at start-up
        self._lost: list[Storage] | None = None  # at the last sleep, if the snapshot has it
        self._lost_first = False  # what was loaded at start-up was lost at the last sleep
        self._again = False  # one is to be written after the next load
        self._loaded = 0.0  # time of the last load
        self._gate = _Gate()
        self._job: _Job | None = None  # the last one
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

    @property
    def writing(self) -> bool:
        """Whether the thread is writing a snapshot, or looking for one."""
        return self._job is not None and not self._job.done

    def _start(self, write: bool) -> _Job:
        """Let a thread look for a snapshot of what is in memory now, and `write` one if there is none."""
        if self._job is None:
            atexit.register(self.close)  # a thread that the interpreter's end meets in torch aborts the process
        else:
            self._job.cancel.set()
        job = self._job = _Job(write)
        job.thread = threading.Thread(target=self._run, args=(job,), name="lora-reload-snapshot", daemon=True)
        try:
            job.thread.start()
        except RuntimeError as error:
            job.thread, job.done, self.reason = None, True, str(error)
            logger.warning("Snapshot: %s", error)
        return job

    def close(self) -> None:
        """The engine shuts down."""
        job = self._job
        if job is not None:
            job.cancel.set()
        self.release(True)
        if job is not None:
            if job.thread is not None:
                job.thread.join()
            atexit.unregister(self.close)

    def hold(self) -> None:
        """From now on memory may change or go; returns when the writer has stopped reading it."""
        if not self._gate.closed:
            self._gate.close()
            self._lost = None

    def release(self, complete: bool) -> None:
        """Undo `hold`, if base weights are `complete`."""
        if self._gate.closed and complete:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self._gate.open()

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
        if self._gate.closed:
            return self.state() | {"reason": "base weights are missing or asleep"}
        self._loaded = 0.0
        job = self._job
        if job is None or job.done or not job.write:
            job = self._start(write=True)
        since = time.monotonic()
        while not job.done:
            if not job.waits:
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

    def _run(self, job: _Job) -> None:
        try:
            stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
            on_device: AbstractContextManager[Any] = torch.cuda.device(self._device) if stream else nullcontext()
            with torch.no_grad(), on_device, torch.cuda.stream(stream) if stream else nullcontext():
                self._keep(job)
        except _Cancelled:
            pass
        except Exception as error:
            with suppress(_Cancelled), self._gate.inside(job):
                self.snapshot = None
                self.reason = f"it could not be written: {type(error).__name__}: {error}"
                job.done = True
                logger.exception("The snapshot could not be written; weights have to be loaded after sleep(level=2)")
        else:
            if (snapshot := self.snapshot) is not None:  # it may have gone meanwhile
                self._ring.warm([snapshot.file])
        finally:
            job.done = True

    def _keep(self, job: _Job) -> None:
        while True:
            try:
                return self._keep_this_version(job)
            except _Changed:
                if job.write and self._when != "always":
                    raise SnapshotError("the weights were changed while they were written") from None

    def _keep_this_version(self, job: _Job) -> None:
        while (rest := self._loaded + _SETTLED - time.monotonic()) > 0:
            if job.cancel.wait(rest):
                raise _Cancelled
        with self._gate.inside(job):
            closings, found = self._gate.closings, self._storages()
            current = digests_of(found)
            mine = self.snapshot
            if mine is not None and mine.manifest.digests() == current and (mine.in_place or not job.write):
                job.done = True
                return

        @contextmanager
        def reading() -> Iterator[None]:
            nonlocal closings
            with self._gate.inside(job):
                if self._gate.closings != closings:
                    if digests_of(self._storages()) != current:
                        raise _Changed
                    closings = self._gate.closings
                yield

        with self._locked(job) if job.write else nullcontext():  # to look only, nobody has to wait
            start = time.perf_counter()
            seconds: float | None = None
            snapshot: Snapshot | None = None
            try:
                snapshot = Snapshot.find(self._path, self._engine, found, current)
            except SnapshotError:
                if job.write:
                    snapshot = write(self._path, self._engine, found, current, reading, job.proceed)
                    seconds = time.perf_counter() - start
            with reading():
                if snapshot is not None:
                    self._take_up(snapshot)
                self.seconds = seconds or self.seconds
                job.done = True

    @contextmanager
    def _locked(self, job: _Job) -> Iterator[None]:
        """No other engine writes meanwhile."""
        lock = Lock(self._path)
        job.waits = True
        try:
            while not lock.take():
                if job.cancel.wait(0.2):
                    raise _Cancelled
        finally:
            job.waits = False
        try:
            yield
        finally:
            lock.release()

    # --- Sleep and wake-up ----------------------------------------------------------------------------------------

    def compare(self, complete: bool = True) -> None:
        """Before level 2 takes the weights, if they are `complete`: see whether the snapshot has their bytes.

        Only tensors that a load brings count. Others (running statistics, scales) may have changed; they are kept on
        the host over the sleep, as without a snapshot.
        """
        self._lost, self._lost_first = None, False
        if not complete or not self._first:
            return
        found = self._storages()
        current = digests_of(found)
        self._lost_first = current == self._first
        if self.snapshot is None:
            return
        if reason := self.snapshot.manifest.misfits(found):
            self.snapshot, self.reason = None, reason
            return
        if differing := self.snapshot.manifest.differing(current):
            self.snapshot = None
            self.reason = f"other weights were loaded since it was written: {listed(differing)} differ"
            logger.info("Snapshot: not used after this sleep: %s", self.reason)
            return
        self._lost = found

    @property
    def usable(self) -> bool:
        """Whether the snapshot has what the last level 2 took."""
        return self._lost is not None

    @property
    def lost_first(self) -> bool:
        """Whether the last level 2 took what was loaded at start-up, whatever snapshot there is."""
        return self._lost_first

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
        snapshot, lost = self.snapshot, self._lost
        assert snapshot is not None and lost is not None
        start = time.perf_counter()
        try:
            nbytes = snapshot.restore(lost, self._ring)
            read = time.perf_counter()
            if self._verify != "off" or not snapshot.surely_unchanged:
                every = _SAMPLE if self._verify == "sample" and snapshot.surely_unchanged else 1
                self._turns += 1
                snapshot.check(lost, every, self._turns % every)
        except BaseException as error:
            self.snapshot, self.reason = None, f"{type(error).__name__}: {error}"
            if isinstance(error, SnapshotError):
                self._again = self._when != "never"
                snapshot.forget()
            raise
        finally:
            self._lost = None
        end = time.perf_counter()
        return {"source": "snapshot", "bytes": nbytes, "seconds": end - start, "verify_seconds": end - read}

    def holds(self) -> bool:
        """Whether memory has now, byte for byte, what was loaded at start-up and is in the snapshot."""
        return self.of_checkpoint and digests_of(self._storages()) == self._first
