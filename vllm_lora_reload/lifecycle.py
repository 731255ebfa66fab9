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
        asleep: the level, 0 if awake.
        unfinished: the error with which the sleep ended, in words.
        reason: why base weights are missing, in words for the person who reads the error.
        transfer: the session that is open.
        cache_asleep: the level of the sleep that the KV cache has not woken from, 0 if it is awake.
    """

    asleep: int = 0
    unfinished: str | None = None
    reason: str | None = None
    transfer: Transfer | None = None
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
        self.cache_asleep = max(self.cache_asleep, level)
        self.unfinished = f"{type(error).__name__}: {error}" if error is not None and self.asleep else None
        if level >= 2:
            self.reason = "sleep(level=2) discarded them and nothing has loaded them since"

    def woke(self) -> None:
        self.asleep = 0
        self.unfinished = None

    def cache_woke(self) -> None:
        self.cache_asleep = 0

    def loaded(self, missing: Sequence[str] = (), total: int = 0) -> None:
        """A load has ended well; `missing` names what nothing has written since level 2, of `total` tensors."""
        global failures
        failures += bool(missing)
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        self.reason = f"{len(missing)} of {total} tensors ({some}) have not been loaded since" if missing else None

    def zeroed(self) -> None:
        """Weights were overwritten on purpose."""
        self.reason = "reset_weights zeroed them and nothing has loaded them since"

    def restore_failed(self, error: BaseException) -> None:
        """A snapshot was to bring the weights back and could not."""
        self.reason = f"the snapshot could not be restored: {type(error).__name__}: {error}"

    def load_failed(self, error: BaseException, wrote: bool) -> None:
        """A load that failed before its first tensor leaves the weights as they were."""
        global failures
        failures += 1
        if wrote or self.reason:
            self.reason = f"the last load failed: {type(error).__name__}: {error}"

    def error(self) -> str | None:
        """Why a request cannot be answered now, and what mends it; None if it can."""
        if self.unfinished:
            return (
                f"sleep(level={self.asleep}) broke off, and memory of the weights may be unmapped: {self.unfinished}. "
                'Call collective_rpc("wake_up"), then wake_up(), or start the engine anew.'
            )
        if self.asleep:
            return f'the engine sleeps at level {self.asleep}. Call wake_up(["weights"]), then ask again.'
        if self.reason is None:
            if self.cache_asleep:
                return 'the KV cache sleeps. Call wake_up(["kv_cache"]), then ask again.'
            return None
        return (
            f"base weights are missing: {self.reason}. Load them with "
            'collective_rpc("reload_weights"), a weight transfer or model.load_weights(...), then ask again.'
        )
