"""The front end's guard: asks once after anything that can matter, refuses while weights are missing, else nothing."""

import abc
import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_lora_reload import AdapterMissingError, LoRAReloadError, WeightsMissingError, client, seams

COMPLETE = {"state": "complete", "error": None, "adapters": {}}
MISSING = {"state": "missing", "error": "base weights are missing: told so", "adapters": {}}


class Engine:
    """A front end that notes its calls; `statuses` is what the workers answer."""

    vllm_config = SimpleNamespace(additional_config={})

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.statuses: Any = [COMPLETE]

        self.lacking: list[Any] = [None]
        self.engine_core = SimpleNamespace(add_request=None, add_request_async=None)

    def add_request(self, request_id: str, *, priority: int = 0, lora_request: Any = None) -> str:
        self.calls.append(("add", request_id, priority))
        return f"added {request_id}"

    def sleep(self, level: int = 1) -> str:
        self.calls.append(("sleep", level))
        return "asleep"

    def wake_up(self, tags: list[str] | None = None) -> str:
        self.calls.append(("wake", tags))
        return "awake"

    def add_lora(self, lora_request: Any) -> bool:
        self.calls.append(("add lora", lora_request.lora_int_id))
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return True

    def collective_rpc(self, method: str, timeout: float | None = None, kwargs: Any = None) -> Any:
        self.calls.append(("rpc", method, timeout) if timeout else ("rpc", method))
        if isinstance(self.statuses, Exception):
            raise self.statuses
        if method == "lora_reload_lacks":
            return self.lacking
        return self.statuses if method == "lora_reload_status" else f"did {method}"


class EngineClient(abc.ABC):  # noqa: B024
    """Root of vLLM's asynchronous front end; it decides whether an object's class can be changed."""


class AsyncEngine(EngineClient):
    """The same as `Engine`, all of it asynchronous."""

    vllm_config = Engine.vllm_config

    def __init__(self) -> None:
        self.sync = Engine()

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        return self.sync.add_request(*args, **kwargs)

    async def sleep(self, *args: Any, **kwargs: Any) -> Any:
        return self.sync.sleep(*args, **kwargs)

    async def wake_up(self, *args: Any, **kwargs: Any) -> Any:
        return self.sync.wake_up(*args, **kwargs)

    async def add_lora(self, *args: Any, **kwargs: Any) -> Any:
        return self.sync.add_lora(*args, **kwargs)

    async def remove_lora(self, *args: Any, **kwargs: Any) -> Any:
        return self.sync.remove_lora(*args, **kwargs)

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        return self.sync.collective_rpc(*args, **kwargs)


class Guarded:
    """A guarded engine of either kind, with one way to call both."""

    def __init__(self, engine: Any) -> None:
        client.guard(engine)
        self.engine = engine
        self.base: Engine = engine.sync if isinstance(engine, AsyncEngine) else engine

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.engine, method)(*args, **kwargs)
        return asyncio.run(result) if isinstance(self.engine, AsyncEngine) else result

    def take(self) -> list[Any]:
        calls, self.base.calls = self.base.calls, []
        return calls


@pytest.fixture(params=[Engine, AsyncEngine])
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    monkeypatch.setattr(seams, "engine_classes", lambda: (Engine, AsyncEngine))
    monkeypatch.setattr(seams, "requests_marked", lambda engine, mark: None)
    return Guarded(request.param())


STATUS = ("rpc", "lora_reload_status")
CONTROL: list[tuple[str, Any, Callable[[Guarded], Any]]] = [
    ("asleep", ("sleep", 2), lambda engine: engine("sleep", level=2)),
    ("awake", ("wake", ["weights"]), lambda engine: engine("wake_up", ["weights"])),
    (
        "did reload_weights",
        ("rpc", "reload_weights", 5.0),
        lambda e: e("collective_rpc", "reload_weights", timeout=5.0),
    ),
]
control = pytest.mark.parametrize(("result", "call", "do"), CONTROL, ids=["sleep", "wake_up", "collective_rpc"])


def test_guard_picks_by_the_kind_of_engine(guarded: Guarded) -> None:
    is_async = isinstance(guarded.engine, AsyncEngine)
    assert isinstance(guarded.engine, client.GuardedAsyncLLM) == is_async
    assert isinstance(guarded.engine, client.GuardedLLMEngine) != is_async


def test_an_engine_that_never_sleeps_is_asked_nothing(guarded: Guarded) -> None:
    for number in range(3):
        assert guarded("add_request", f"r{number}", priority=7) == f"added r{number}"
    assert guarded.take() == [("add", f"r{number}", 7) for number in range(3)]


@control
def test_controls_go_through_unchanged(guarded: Guarded, result: str, call: Any, do: Callable[[Guarded], Any]) -> None:
    assert do(guarded) == result
    assert guarded.take() == [call]


@control
def test_next_request_asks_exactly_once(guarded: Guarded, result: str, call: Any, do: Callable[[Guarded], Any]) -> None:
    do(guarded)
    do(guarded)
    guarded.take()
    guarded("add_request", "a")
    guarded("add_request", "b")
    assert guarded.take() == [STATUS, ("add", "a", 0), ("add", "b", 0)]


@control
def test_request_is_refused_while_missing(guarded: Guarded, result: str, call: Any, do: Any) -> None:
    do(guarded)
    guarded.take()
    guarded.base.statuses = [MISSING]
    for _ in range(2):
        with pytest.raises(WeightsMissingError, match="rank 0: base weights are missing: told so"):
            guarded("add_request", "a")
    assert guarded.take() == [STATUS, STATUS]


def test_request_passes_once_complete(guarded: Guarded) -> None:
    guarded("sleep", 2)
    guarded.base.statuses = [MISSING]
    with pytest.raises(WeightsMissingError):
        guarded("add_request", "a")
    guarded.base.statuses = [COMPLETE]
    guarded.take()
    assert guarded("add_request", "a") == "added a"
    assert guarded("add_request", "b") == "added b"
    assert guarded.take() == [STATUS, ("add", "a", 0), ("add", "b", 0)]


def test_each_cycle_is_asked_about(guarded: Guarded) -> None:
    for _ in range(2):
        guarded("sleep", 2)
        guarded("wake_up")
        guarded("collective_rpc", "reload_weights")
        guarded("add_request", "a")
    assert guarded.take().count(STATUS) == 2


def test_refusal_is_a_value_error() -> None:
    """vLLM's servers answer those with a 4xx status."""
    assert issubclass(WeightsMissingError, ValueError) and issubclass(WeightsMissingError, LoRAReloadError)


@pytest.mark.parametrize(
    ("statuses", "message"),
    [
        ([COMPLETE, MISSING], f"rank 1: {MISSING['error']}"),
        ([MISSING, MISSING, COMPLETE], f"rank 0: {MISSING['error']} (and 1 more ranks)"),
        ([COMPLETE, MISSING, MISSING, MISSING], f"rank 1: {MISSING['error']} (and 2 more ranks)"),
    ],
)
def test_message_with_several_ranks(guarded: Guarded, statuses: list[Any], message: str) -> None:
    guarded("wake_up")
    guarded.base.statuses = statuses
    with pytest.raises(WeightsMissingError) as refused:
        guarded("add_request", "a")
    assert str(refused.value) == message


def test_unknown_state_is_asked_again(guarded: Guarded) -> None:
    guarded("wake_up")
    guarded.base.statuses = TimeoutError("worker is busy")
    with pytest.raises(TimeoutError):
        guarded("add_request", "a")
    guarded.base.statuses = [MISSING]
    with pytest.raises(WeightsMissingError):
        guarded("add_request", "a")


@pytest.mark.parametrize(
    "answer", [None, "did it", {}, {"error": None}, {"adapters": {}}, {"error": None, "adapters": 7}]
)
def test_what_is_no_status_is_asked_again(guarded: Guarded, answer: Any) -> None:
    guarded("wake_up")
    guarded.base.statuses = [COMPLETE, answer]
    for _ in range(2):
        with pytest.raises(WeightsMissingError, match=r"rank 1: asked how its weights stand, this worker said \("):
            guarded("add_request", "a")
    guarded.base.statuses = [COMPLETE, COMPLETE]
    guarded.take()
    assert [guarded("add_request", name) for name in "ab"] == ["added a", "added b"]
    assert guarded.take() == [STATUS, ("add", "a", 0), ("add", "b", 0)]


def test_a_failed_control_is_asked_about_too(guarded: Guarded) -> None:
    guarded.base.statuses = RuntimeError("half way")
    with pytest.raises(RuntimeError):
        guarded("collective_rpc", "reload_weights")
    guarded.base.statuses = [MISSING]
    with pytest.raises(WeightsMissingError):
        guarded("add_request", "a")


@pytest.mark.parametrize(
    ("args", "kwargs"), [((2, "keep"), {}), ((2,), {"mode": "keep"}), ((), {"level": 2, "mode": "keep"})]
)
def test_requests_are_not_kept_over_level_2(guarded: Guarded, args: Any, kwargs: Any) -> None:
    """They would be the first to run after the wake-up, weights or not."""
    with pytest.raises(ValueError, match="kept over sleep"):
        guarded("sleep", *args, **kwargs)
    assert guarded.take() == []
    assert guarded("sleep", 2) == "asleep"


def test_marks_of_new_weights() -> None:
    """Prefixes, and what encoders made of images with this adapter."""

    @dataclass
    class Feature:
        identifier: str

    guard = client.Guard(warn_only=False)
    lora = seams.lora_request("a", 3, "/a")
    features = [Feature("a:1"), Feature("2")]
    request = SimpleNamespace(lora_request=lora, cache_salt="x", mm_features=features)
    guard._mark(request)
    assert request.cache_salt == "x" and request.mm_features is features
    guard.prefixes.updated(lora)
    version = guard.prefixes.salt(lora)
    guard._mark(request)
    assert request.cache_salt == f"x{version}" and version.startswith("|adapter version ")
    assert request.mm_features == [Feature(f"a:1{version}"), Feature("2")]
    assert features[0].identifier == "a:1"
    text = SimpleNamespace(lora_request=lora, cache_salt=None, mm_features=None)
    guard._mark(text)
    assert text.cache_salt == version and text.mm_features is None
    guard._mark(SimpleNamespace(lora_request=None, cache_salt=None, mm_features=None))


# --- Requests for adapters that are not there ---------------------------------------------------------------------


def lora(path: str, number: int = 7) -> Any:
    return seams.lora_request("policy", number, path)


LACKS = ("rpc", "lora_reload_lacks")


@pytest.mark.parametrize("path", ["lora_reload:policy", "/nowhere/at/all", "~/nowhere/at/all"])
def test_adapter_without_files_is_asked_about_once(guarded: Guarded, path: str, tmp_path: Path) -> None:
    """vLLM would look for its files in the midst of a step, and the engine would die."""
    guarded.base.lacking = [None, "it was removed"]
    for _ in range(2):
        with pytest.raises(AdapterMissingError, match="adapter 'policy' is not there: rank 1: it was removed"):
            guarded("add_request", "a", lora_request=lora(path))
    guarded.take()
    guarded.base.lacking = [None, None]
    for _ in range(2):
        guarded("add_request", "a", lora_request=lora(path))
    assert [call[1] for call in guarded.take()] == ["lora_reload_lacks", "a", "a"]
    guarded("remove_lora", 9)
    guarded("add_request", "a", lora_request=lora(path))
    assert LACKS in guarded.take(), "others may have gone with it"


def test_others_are_not_asked_about(guarded: Guarded, tmp_path: Path) -> None:
    """Those with files, from a hub, and a framework's with tensors."""
    (tmp_path / "adapter_config.json").touch()

    class WithTensors(type(lora("x"))):  # type: ignore[misc]
        """As frameworks make them."""

    mine = WithTensors(lora_name="a", lora_int_id=1, lora_path="/nowhere")
    mine.lora_path = ""
    for request in (lora(str(tmp_path)), lora("someone/policy"), mine, None):
        guarded("add_request", "a", lora_request=request)
    assert [call[0] for call in guarded.take()] == ["add"] * 4


def test_what_workers_said_before_a_sleep_does_not_count_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for the status, while somebody else puts the engine to sleep."""
    monkeypatch.setattr(seams, "engine_classes", lambda: (Engine, AsyncEngine))

    class Slow(AsyncEngine):
        async def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
            said = await super().collective_rpc(method, *args, **kwargs)
            if method == "lora_reload_status" and not asked.is_set():
                asked.set()
                await go_on.wait()
            return said

    async def main() -> None:
        nonlocal asked, go_on
        asked, go_on = asyncio.Event(), asyncio.Event()
        engine: Any = Slow()
        client.guard(engine)
        await engine.wake_up()
        request = asyncio.create_task(engine.add_request("a"))
        await asked.wait()
        engine.sync.statuses = [MISSING]
        await engine.sleep(2)
        go_on.set()
        with pytest.raises(WeightsMissingError):
            await request

    asked: Any = None
    go_on: Any = None
    asyncio.run(main())


def test_request_during_a_sleep_does_not_switch_the_refusal_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may wait for running requests first, and would queue new ones until it wakes up."""
    monkeypatch.setattr(seams, "engine_classes", lambda: (Engine, AsyncEngine))

    class Slow(AsyncEngine):
        async def sleep(self, *args: Any, **kwargs: Any) -> Any:
            await waits.wait()
            self.sync.statuses = [MISSING]
            return await super().sleep(*args, **kwargs)

    async def main() -> None:
        nonlocal waits
        waits = asyncio.Event()
        engine: Any = Slow()
        client.guard(engine)
        asleep = asyncio.create_task(engine.sleep(2))
        await asyncio.sleep(0)
        with pytest.raises(WeightsMissingError, match="falling asleep"):
            await engine.add_request("before")
        waits.set()
        await asleep
        with pytest.raises(WeightsMissingError):
            await engine.add_request("after")

    waits: Any = None
    asyncio.run(main())
