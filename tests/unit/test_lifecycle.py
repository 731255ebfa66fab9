"""Every transition of the state machine, and what it tells people."""

from collections.abc import Callable

import pytest

from vllm_lora_reload import lifecycle as lifecycle_module
from vllm_lora_reload.lifecycle import Lifecycle, State

ERROR = OSError("shard 2 is cut off")
STEPS: dict[str, Callable[[Lifecycle], None]] = {
    "sleep 1": lambda lifecycle: lifecycle.slept(1),
    "sleep 2": lambda lifecycle: lifecycle.slept(2),
    "wake": lambda lifecycle: (lifecycle.woke(), lifecycle.cache_woke())[0],
    "wake weights": Lifecycle.woke,
    "load": Lifecycle.loaded,
    "fail early": lambda lifecycle: lifecycle.load_failed(ERROR, wrote=False),
    "fail late": lambda lifecycle: lifecycle.load_failed(ERROR, wrote=True),
}


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        ("", State.COMPLETE),
        ("sleep 1", State.OFFLOADED),
        ("sleep 1, wake", State.COMPLETE),
        ("sleep 2", State.DISCARDED),
        ("sleep 2, wake", State.MISSING),
        ("sleep 2, wake, load", State.COMPLETE),
        ("sleep 2, wake, wake", State.MISSING),
        ("wake", State.COMPLETE),
        ("load", State.COMPLETE),
        ("sleep 2, wake, sleep 1", State.OFFLOADED),
        ("sleep 2, wake, sleep 1, wake", State.MISSING),
        ("sleep 2, wake, sleep 1, wake, load", State.COMPLETE),
        ("sleep 2, wake, load, sleep 1, wake", State.COMPLETE),
        ("sleep 2, sleep 1", State.DISCARDED),
        ("sleep 2, sleep 1, wake", State.MISSING),
        ("sleep 1, sleep 2", State.DISCARDED),
        ("sleep 1, sleep 2, wake", State.MISSING),
        ("sleep 2, wake, load, sleep 2, wake", State.MISSING),
        ("fail early", State.COMPLETE),
        ("fail late", State.MISSING),
        ("fail late, load", State.COMPLETE),
        ("fail late, sleep 1, wake", State.MISSING),
        ("fail late, fail early", State.MISSING),
        ("sleep 2, wake, fail early", State.MISSING),
        ("sleep 2, wake, fail late", State.MISSING),
        ("sleep 2, wake, fail late, load", State.COMPLETE),
        ("sleep 2, wake, load, fail early", State.COMPLETE),
    ],
)
def test_state_after(steps: str, state: State) -> None:
    lifecycle = Lifecycle()
    for step in filter(None, steps.split(", ")):
        STEPS[step](lifecycle)
    assert lifecycle.state is state
    if state in (State.COMPLETE, State.MISSING):
        assert (lifecycle.error() is None) == (state is State.COMPLETE)


def test_error_after_sleep_names_cause_and_remedy() -> None:
    lifecycle = Lifecycle()
    lifecycle.slept(2)
    lifecycle.woke()
    error = lifecycle.error()
    assert error is not None and "sleep(level=2)" in error
    for call in ('collective_rpc("reload_weights")', "weight transfer", "model.load_weights("):
        assert call in error


def test_error_after_a_failed_load_names_that_failure_instead() -> None:
    lifecycle = Lifecycle()
    lifecycle.slept(2)
    lifecycle.woke()
    lifecycle.load_failed(ERROR, wrote=False)
    error = lifecycle.error()
    assert error is not None and "OSError: shard 2 is cut off" in error and "sleep(level=2)" not in error
    assert 'collective_rpc("reload_weights")' in error


def test_no_request_passes_while_discarded() -> None:
    lifecycle = Lifecycle()
    lifecycle.slept(2)
    assert lifecycle.error() is not None


def test_no_request_passes_while_asleep() -> None:
    lifecycle = Lifecycle()
    lifecycle.slept(1)
    error = lifecycle.error()
    assert error is not None and "sleeps at level 1" in error and 'wake_up(["weights"])' in error
    lifecycle.woke()
    lifecycle.cache_woke()
    assert lifecycle.error() is None


def test_a_pause_unmaps_nothing() -> None:
    """Level 0."""
    lifecycle = Lifecycle()
    lifecycle.slept(0, RuntimeError("no"))
    assert lifecycle.error() is None and lifecycle.state is State.COMPLETE


def test_a_load_that_ends_short_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front end in the same process looks at it."""
    monkeypatch.setattr(lifecycle_module, "failures", 0)
    Lifecycle().loaded()
    assert lifecycle_module.failures == 0
    Lifecycle().loaded(["a"], 2)
    assert lifecycle_module.failures == 1


@pytest.mark.parametrize(
    ("steps", "error", "waits"),
    [
        ("sleep 1", "sleeps at level 1", True),
        ("sleep 1, wake weights", "KV cache sleeps", True),
        ("sleep 1, wake", None, False),
        ("sleep 2", "sleeps at level 2", False),
        ("sleep 2, wake weights", "base weights are missing", False),
        ("sleep 2, wake weights, load", "KV cache sleeps", False),
        ("sleep 2, wake, load", None, False),
        ("fail late, sleep 1", "sleeps at level 1", False),
        ("sleep 1, wake weights, fail late", "base weights are missing", False),
    ],
)
def test_ready_means_weights_and_cache(steps: str, error: str | None, waits: bool) -> None:
    """`waits`: nothing is missing, the sleep has only to end."""
    lifecycle = Lifecycle()
    for step in steps.split(", "):
        STEPS[step](lifecycle)
    found = lifecycle.error()
    assert (found is None) if error is None else (found is not None and error in found)
    assert lifecycle.waits is waits
