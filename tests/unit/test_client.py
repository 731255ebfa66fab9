"""The front end: a refusal reaches whoever asked, as an error; signatures stay vLLM's."""

import abc
import asyncio
import gc
import inspect
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_lora_reload import AdapterMissingError, LoRAReloadError, WeightsMissingError, client, door, runner, seams
from vllm_lora_reload import worker as worker_module

COMPLETE = {"state": "complete", "error": None, "waits": False, "depth": 0, "apart": None, "adapters": {}}
ASLEEP = COMPLETE | {"state": "offloaded", "error": "the engine sleeps at level 1", "waits": True, "depth": 2}


@dataclass
class State:
    """Of one request in an output processor."""

    request_id: str
    queue: Any = None
    parent_req: Any = None


@dataclass
class Processor:
    """Of outputs, as vLLM's; children of a prompt are named after their parent."""

    request_states: dict[str, State] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    def abort_requests(self, ids: list[str], internal: bool) -> list[str]:
        assert internal
        gone = [each for each in self.request_states if each in ids or each.partition("/")[0] in ids]
        return [self.request_states.pop(each).request_id for each in gone]

    def process_outputs(self, outputs: list[Any]) -> Any:
        self.seen += [output.request_id for output in outputs]
        for output in outputs:
            self.request_states.pop(output.request_id)
        return SimpleNamespace(request_outputs=list(outputs), reqs_to_abort=[])

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)


class CoreClient(abc.ABC):  # noqa: B024 - as vLLM's is one
    """By which requests are sent to the core."""

    def __init__(self, aborted: list[str], sent: list[Any]) -> None:
        self.aborted, self.sent = aborted, sent

    def abort_requests(self, ids: list[str]) -> None:
        self.aborted += ids

    def add_request(self, request: Any) -> str:
        self.sent.append(request)
        return "sent"

    async def add_request_async(self, request: Any) -> str:
        return self.add_request(request)


class Engine:
    """An offline front end; its core answers what `outputs` holds."""

    vllm_config = SimpleNamespace(additional_config={})

    def __init__(self) -> None:
        self.output_processor = Processor()
        self.outputs: list[Any] = []
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.statuses: list[Any] = [COMPLETE]
        self.error: Exception | None = None
        self.engine_core: Any = CoreClient(self.aborted, self.calls)

    def add_request(self, request_id: str, n: int = 1) -> str:
        parent = SimpleNamespace(request_id=request_id)
        for number in range(n):
            name = f"{request_id}/{number}" if n > 1 else request_id
            self.output_processor.request_states[name] = State(name, None, parent if n > 1 else None)
        if self.error:
            raise self.error
        return request_id

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()

    def step(self) -> Any:
        outputs, self.outputs = self.outputs, []
        return [each.request_id for each in self.output_processor.process_outputs(outputs).request_outputs]

    def sleep(self, level: int = 1, mode: str = "abort") -> str:
        return f"slept {level} {mode}"

    def collective_rpc(self, method: str) -> Any:
        self.calls.append(method)
        return self.statuses


class EngineClient(abc.ABC):  # noqa: B024
    """Root of vLLM's asynchronous front end; it decides whether an object's class can be changed."""


class AsyncEngine(EngineClient):
    def __init__(self) -> None:
        self.vllm_config, self.output_processor = Engine.vllm_config, Processor()
        self.engine_core: Any = CoreClient([], [])

    async def add_request(self) -> None: ...

    async def sleep(self, level: int = 1, mode: str = "abort") -> str:
        return f"slept {level} {mode}"


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "engine_classes", lambda: (Engine, AsyncLLM))


@pytest.fixture
def engine() -> Any:
    engine = Engine()
    client.guard(engine)
    return engine


def answered(request_id: str) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [1], finish_reason=FinishReason.STOP, stop_reason="a stop string")


def refused(request_id: str, error: Exception) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=door.packed(error))


@pytest.mark.parametrize(
    "error", [door.weights_missing("why: they are"), door.adapter_missing("a:b", "gone"), WeightsMissingError("plain")]
)
def test_a_refusal_crosses_processes(error: Exception) -> None:
    found = door.unpacked(refused("a", error))
    assert type(found).__name__ == type(error).__name__ and str(found) == str(error)
    assert isinstance(found, (WeightsMissingError, AdapterMissingError)) and isinstance(found, ValueError)


@pytest.mark.parametrize("reason", [None, 7, "stop", "lora_reload", "lora_reload:Exception:x", "lora_reload:x"])
def test_other_outputs_are_no_refusals(reason: Any) -> None:
    output = EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR, stop_reason=reason)
    assert door.unpacked(output) is None


def test_a_stop_string_that_looks_like_one_ends_no_running_request() -> None:
    assert door.unpacked(EngineCoreOutput("a", [1], stop_reason=door.packed(WeightsMissingError("x")))) is None


def test_whoever_waits_gets_the_error(engine: Any) -> None:
    """And only they."""
    queues: dict[str, list[Any]] = {"a": [], "b": []}
    processor = engine.output_processor
    for name, queue in queues.items():
        processor.request_states[name] = State(name, SimpleNamespace(put=queue.append))
    processed = processor.process_outputs([refused("a", WeightsMissingError("x")), answered("b")])
    assert [str(each) for each in queues["a"]] == ["x"] and isinstance(queues["a"][0], WeightsMissingError)
    assert queues["b"] == [] and processor.seen == ["b"] and not processor.request_states
    assert processed.reqs_to_abort == [] and engine.lora_reload.refused == []


def test_samples_of_one_prompt_end_together(engine: Any) -> None:
    engine.add_request("a", n=3)
    processed = engine.output_processor.process_outputs([refused("a/1", WeightsMissingError("x"))])
    assert processed.reqs_to_abort == ["a/0", "a/2"], "the core does not know the other any more"
    assert not engine.output_processor.request_states and len(engine.lora_reload.refused) == 1
    engine.output_processor.process_outputs([refused("a/2", WeightsMissingError("x"))])
    assert len(engine.lora_reload.refused) == 1


def test_offline_others_are_answered_first(engine: Any) -> None:
    for name in "abcd":
        engine.add_request(name)
    engine.outputs = [refused("a", WeightsMissingError("first")), answered("b"), refused("c", WeightsMissingError("y"))]
    assert engine.step() == ["b"]
    engine.outputs = [answered("d")]
    assert engine.has_unfinished_requests() and engine.step() == ["d"]
    assert engine.has_unfinished_requests()
    with pytest.raises(WeightsMissingError, match="first"):
        engine.step()
    assert not engine.has_unfinished_requests() and engine.step() == []


def test_what_the_core_refuses_at_once_leaves_nothing_behind(engine: Any) -> None:
    engine.error = WeightsMissingError("x")
    vars(engine.error)["request_id"] = "a/1"
    with pytest.raises(WeightsMissingError):
        engine.add_request("a", n=3)
    assert not engine.has_unfinished_requests() and engine.aborted == ["a/0", "a/1", "a/2"]


def test_offline_nothing_waits_for_a_wake_up(engine: Any) -> None:
    engine.add_request("a")
    assert engine.calls == [], "an engine that never sleeps is asked nothing"
    engine.sleep()
    engine.statuses = [ASLEEP]
    for _ in range(2):
        with pytest.raises(WeightsMissingError, match="rank 0: the engine sleeps at level 1"):
            engine.add_request("b")
    engine.statuses = [COMPLETE]
    assert [engine.add_request(name) for name in "cd"] == ["c", "d"]
    assert engine.calls == ["lora_reload_status"] * 3
    engine.sleep(0)
    engine.add_request("e")
    assert len(engine.calls) == 3, "a pause is vLLM's own"


@pytest.mark.parametrize(
    ("args", "kwargs"), [((2, "keep"), {}), ((2,), {"mode": "keep"}), ((), {"level": 2, "mode": "keep"})]
)
@pytest.mark.parametrize("kind", [Engine, AsyncEngine])
def test_requests_are_not_kept_over_level_2(kind: Any, args: Any, kwargs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "engine_classes", lambda: (Engine, AsyncEngine))
    engine = kind()
    client.guard(engine)

    def sleep(*args: Any, **kwargs: Any) -> Any:
        result = engine.sleep(*args, **kwargs)
        return asyncio.run(result) if kind is AsyncEngine else result

    assert sleep(*args, **kwargs) == "slept 2 keep", "with no request nothing is kept"
    engine.output_processor.request_states["a"] = State("a")
    with pytest.raises(ValueError, match="kept over sleep"):
        sleep(*args, **kwargs)
    assert sleep(2) == "slept 2 abort" and sleep(1, "keep") == "slept 1 keep"


def test_refusal_is_a_value_error() -> None:
    """vLLM's servers answer those with a 4xx status."""
    assert issubclass(WeightsMissingError, ValueError) and issubclass(WeightsMissingError, LoRAReloadError)


def test_marks_of_new_weights() -> None:
    """Prefixes, and what encoders made of images with this adapter."""

    @dataclass
    class Feature:
        identifier: str

    guard = client.Guard(warn_only=False)
    lora = seams.lora_request("a", 3, "/a")
    features = [Feature("a:1"), Feature("2")]
    request = SimpleNamespace(lora_request=lora, cache_salt="x", mm_features=features)
    guard.mark(request)
    assert request.cache_salt == "x" and request.mm_features is features
    guard.prefixes.updated(lora)
    version = guard.prefixes.salt(lora)
    guard.mark(request)
    assert request.cache_salt == f"x{version}" and version.startswith("|adapter version ")
    assert request.mm_features == [Feature(f"a:1{version}"), Feature("2")]
    assert features[0].identifier == "a:1"
    text = SimpleNamespace(lora_request=lora, cache_salt=None, mm_features=None)
    guard.mark(text)
    assert text.cache_salt == version and text.mm_features is None
    guard.mark(SimpleNamespace(lora_request=None, cache_salt=None, mm_features=None))


def test_requests_are_marked_once_and_their_client_is_not_kept() -> None:
    """vLLM freezes what the garbage collector looks at: a client in a circle would keep its engine for ever."""

    class Async:
        engine_core: Any

        async def add_request(self) -> None: ...

    for engine, name in ((Engine(), "add_request"), (Async(), "add_request_async")):
        sent: list[Any] = []
        marked: list[Any] = []
        engine.engine_core = CoreClient([], sent)
        seams.requests_marked(engine, marked.append)
        done = getattr(engine.engine_core, name)("a request")
        assert (asyncio.run(done) if name == "add_request_async" else done) == "sent"
        assert marked == sent == ["a request"]
        kept = weakref.ref(engine.engine_core)
        gc.disable()
        try:
            del engine.engine_core
            assert kept() is None
        finally:
            gc.enable()


MIXINS = [
    (client.GuardedLLMEngine, LLMEngine),
    (client.GuardedAsyncLLM, AsyncLLM),
    (door.GuardedEngineCore, EngineCore),
    (worker_module.LoRAReloadWorker, Worker),
    (worker_module.TransferSessions, Worker),
    (worker_module.DraftSessions, Worker),
    (runner.LoRAReloadModelRunner, GPUModelRunner),
]


@pytest.mark.parametrize(("mixin", "cls"), MIXINS, ids=[mixin.__name__ for mixin, _ in MIXINS])
def test_signatures_are_those_of_vllm(mixin: type, cls: type) -> None:
    """Frameworks decide by them what an engine can do (ms-swift: ``tags`` of ``wake_up``, ``mode`` of ``sleep``)."""
    extended = cls.__new__(cls)
    seams.extend(extended, mixin)
    names = [name for name in vars(mixin) if inspect.isfunction(getattr(cls, name, None)) and not name.startswith("__")]
    assert names
    for name in names:
        ours, theirs = getattr(type(extended), name), getattr(cls, name)
        assert ours is not theirs
        assert inspect.signature(ours) == inspect.signature(theirs), name
        assert ours.__doc__ == theirs.__doc__
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs)


@pytest.mark.parametrize("cls", [LLMEngine, AsyncLLM])
def test_engines_say_which_tags_and_modes_they_take(cls: Any) -> None:
    extended = cls.__new__(cls)
    seams.extend(extended, client.GuardedAsyncLLM if cls is AsyncLLM else client.GuardedLLMEngine)
    assert list(inspect.signature(extended.wake_up).parameters) == ["tags"]
    assert list(inspect.signature(extended.sleep).parameters) == ["level", "mode"]
