"""Where a worker stands in the cycle of sleeping, waking and loading.

      COMPLETE --sleep(1)--> OFFLOADED --wake_up--> COMPLETE
      COMPLETE --sleep(2)--> DISCARDED --wake_up--> MISSING --a load succeeds--> COMPLETE
      COMPLETE --a weight transfer starts--> LOADING --it finishes--> COMPLETE
      DISCARDED --wake_up restores a snapshot--> COMPLETE
      any awake state --a load fails after it wrote something--> MISSING

`OFFLOADED` keeps what it was: a worker that sleeps at level 1 while weights are missing wakes up `MISSING`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

# Loads that failed or ended short in this process. A front end in the same one looks at it: direct loads do not pass
# through it.
failures = 0


ASLEEP = 2  # a `Lifecycle.depth`


class State(enum.Enum):
    COMPLETE = "complete"
    OFFLOADED = "offloaded"
    DISCARDED = "discarded"
    MISSING = "missing"
    LOADING = "loading"


class Transfer(enum.Enum):
    """What an open weight transfer session updates. A draft model's weights are not this package's concern."""

    MAIN = "main"
    DRAFT = "draft"


@dataclass
class Lifecycle:
    """One per worker.

    A transfer session does not make requests fail: frameworks pause the scheduler and let them queue meanwhile.

    Attributes:
        loads: what this engine can load base weights with, in words.
        asleep: the level, 0 if awake.
        unfinished: the error with which the sleep ended, in words.
        reason: why base weights are missing, in words for the person who reads the error.
        elsewhere: they are missing only because another rank could not bring its own back.
        transfer: the session that is open.
        ended: what has ended the last session before its trainer did.
        cache_asleep: the level of the sleep that the KV cache has not woken from, 0 if it is awake.
    """

    loads: str = 'collective_rpc("reload_weights"), a weight transfer or model.load_weights(...)'
    asleep: int = 0
    unfinished: str | None = None
    reason: str | None = None
    elsewhere: bool = False
    transfer: Transfer | None = None
    ended: str | None = None
    cache_asleep: int = 0

    @property
    def waits(self) -> bool:
        """Whether requests cannot be answered now, but all that is needed is that a sleep at level 1 ends."""
        levels = {self.asleep, self.cache_asleep} - {0}
        return levels == {1} and not self.unfinished and not self.reason

    @property
    def state(self) -> State:
        if self.asleep:
            return State.OFFLOADED if self.asleep == 1 else State.DISCARDED
        if self.reason:
            return State.MISSING
        return State.LOADING if self.transfer is Transfer.MAIN else State.COMPLETE

    def slept(self, level: int, error: BaseException | None = None) -> None:
        """After an `error` too nobody knows which memory is mapped."""
        self.asleep = max(self.asleep, level)
        self.unfinished = f"{type(error).__name__}: {error}" if error is not None and self.asleep else None
        if level >= 2:
            self._missing("sleep(level=2) discarded them and nothing has loaded them since")

    def woke(self) -> None:
        self.asleep = 0
        self.unfinished = None

    def cache_slept(self, level: int) -> None:
        self.cache_asleep = max(self.cache_asleep, level)

    def cache_woke(self) -> None:
        self.cache_asleep = 0

    def loaded(self, missing: Sequence[str] = (), total: int = 0) -> None:
        """A load has ended well; `missing` names what nothing has written since level 2, of `total` tensors."""
        global failures
        failures += bool(missing)
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        self._missing(f"{len(missing)} of {total} tensors ({some}) have not been loaded since" if missing else None)

    def zeroed(self) -> None:
        """Weights were overwritten on purpose."""
        self._missing("reset_weights zeroed them and nothing has loaded them since")

    def lost(self) -> None:
        """Memory of the weights was found to hold something else, though no sleep took it."""
        global failures
        failures += 1
        self._missing("their memory was taken without sleep(level=2) and nothing has loaded them since")

    def restore_failed(self, error: BaseException, elsewhere: bool = False) -> None:
        """A snapshot was to bring the weights back and could not, here or on another rank only."""
        self._missing(f"the snapshot could not be restored: {type(error).__name__}: {error}")
        self.elsewhere = elsewhere

    def no_snapshot(self, why: str) -> None:
        """There was none that could bring the weights back."""
        self.reason = f"sleep(level=2) discarded them, and no snapshot has them: {why}"

    def load_failed(self, error: BaseException, wrote: bool) -> None:
        """A load that failed before it wrote anything leaves the weights as they were."""
        global failures
        failures += 1
        if wrote or self.reason:
            self._missing(f"the last load failed: {type(error).__name__}: {error}")

    def started(self, transfer: Transfer) -> None:
        """A session is open."""
        self.transfer, self.ended = transfer, None

    def end_transfer(self, by: str, wrote: bool) -> None:
        """A session was ended `by` something else than its trainer."""
        self.transfer, self.ended = None, by
        if wrote:
            self._missing(f"{by} came before finish_weight_update, and a part of the weights was written by then")

    def _missing(self, reason: str | None) -> None:
        self.reason, self.elsewhere = reason, False

    @property
    def depth(self) -> int:
        """How near this is to what is wrong with the engine: of several ranks' errors the deepest is to be told.

        3 for a sleep that broke off, 2 for one that is asleep, 1 for one whose weights are missing, 0 if they are
        missing only because of another rank, or if nothing is wrong.
        """
        if self.asleep or (self.cache_asleep and not self.reason):
            return ASLEEP + bool(self.unfinished)
        return int(self.reason is not None and not self.elsewhere)

    def error(self) -> str | None:
        """Why a request cannot be answered now, the deepest cause first, and what mends it; None if it can."""
        if self.unfinished:
            return (
                f"sleep(level={self.asleep}) broke off, and memory of the weights may be unmapped: {self.unfinished}. "
                'Call collective_rpc("wake_up"), then wake_up(), or start the engine anew.'
            )
        if self.asleep == 1 and self.reason:
            return (
                f"the engine sleeps at level 1, and base weights are missing: {self.reason}. "
                f'Call wake_up(["weights"]), load them with {self.loads}, then ask again.'
            )
        if self.asleep:
            return f'the engine sleeps at level {self.asleep}. Call wake_up(["weights"]), then ask again.'
        if self.reason is None:
            if self.cache_asleep:
                return 'the KV cache sleeps. Call wake_up(["kv_cache"]), then ask again.'
            return None
        return f"base weights are missing: {self.reason}. Load them with {self.loads}, then ask again."
