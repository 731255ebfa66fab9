"""The worker's part in front of small fake workers: what happens in which order, and when not."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.wrapped import Block, Wrapper, nothing_to_load
from vllm_lora_reload import seams, session
from vllm_lora_reload.errors import AsleepError
from vllm_lora_reload.runner import LoRAReloadModelRunner
from vllm_lora_reload.session import WorkerState
from vllm_lora_reload.settings import Settings
from vllm_lora_reload.snapshot import file_states
from vllm_lora_reload.worker import extend

COMPLETE = {
    "state": "complete",
    "error": None,
    "waits": False,
    "depth": 0,
    "apart": None,
    "adapters": {},
    "snapshot": None,
    "replay": None,
    "last_restore": None,
    "ring_bytes": 0,
}


class Log(list[str]):
    def __call__(self, entry: str) -> None:
        self.append(entry)

    def take(self) -> list[str]:
        entries = list(self)
        self.clear()
        return entries


class FakePart:
    """Stands for `LoRAState` and for `UnregisteredTensors`."""

    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name
        self.storages: set[int] = set()
        self.lost = False
        self.broken: dict[int, str] = {}

    def save(self) -> None:
        self.log(f"{self.name}.save")

    def restore(self) -> None:
        self.log(f"{self.name}.restore")

    def put_pending(self) -> None:
        self.log(f"{self.name}.put_pending")

    def put_back(self) -> None:
        self.log(f"{self.name}.put_back")

    def slept(self) -> None:
        self.unmapped = True

    def woke(self) -> None:
        self.unmapped = False

    def read_changed(self) -> None:
        self.log(f"{self.name}.read_changed")

    def absent(self) -> None:
        self.log(f"{self.name}.absent")


class FakeRunner:
    lora: Any = None

    def __init__(self, log: Log) -> None:
        self.log = log

    def reset_lora_state(self) -> None:
        self.log("reset")
        if self.lora is not None:
            self.lora.lost = False

    def check_shape(self, name: str, shape: torch.Size) -> None:
        if shape != (3, 2):
            raise ValueError(f"{name} has shape {list(shape)}")


def write(state: WorkerState) -> None:
    """As a loader does; in the base view."""
    for _, weight in state.incoming([("up.weight", torch.ones(3, 2))]):
        state.model.up.weight.data.copy_(weight)  # type: ignore[union-attr,operator]


class SingleShotWorker:
    """What vLLM's worker does before 0.21, noted in a log. `fail` makes the next call fail, after `gives` tensors."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.model_runner: Any = FakeRunner(log)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace())
        self.fail: str | None = None
        self.gives = 0

    def _do(self, what: str) -> None:
        state: WorkerState = self.lora_reload  # type: ignore[attr-defined]
        view = "" if isinstance(state.model.up, Wrapper) else " in view"
        self.log(what + view)
        for _ in range(self.gives):
            write(state)
        if self.fail == what:
            raise RuntimeError(f"{what} failed")

    def sleep(self, level: int) -> None:
        self._do(f"sleep {level}")

    def wake_up(self, tags: list[str] | None) -> None:
        self._do(f"wake {tags}")

    def update_weights(self, update_info: Any) -> None:
        self._do(f"update {update_info}")

    def compile_or_warm_up_model(self) -> str:
        self.log("warm up")
        return "warm"

    def shutdown(self) -> None:
        self.log("shutdown")


class SessionWorker(SingleShotWorker):
    """What it does since."""

    def start_weight_update(self, *, checkpoint: bool = True) -> None:
        self._do(f"start {checkpoint}")

    def start_draft_weight_update(self) -> None:
        self._do("start draft")

    def finish_weight_update(self) -> None:
        self._do("finish")


@pytest.fixture
def log() -> Log:
    return Log()


def make(cls: type[SingleShotWorker], log: Log, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(session, "LoRAState", lambda *args: FakePart(log, "lora"))
    monkeypatch.setattr(session, "Adapters", lambda *args: FakePart(log, "adapters"))
    monkeypatch.setattr(session, "UnregisteredTensors", lambda *args, known, more: FakePart(log, "unregistered"))
    monkeypatch.setattr(seams, "abort_layerwise_reload", lambda model: log("abort"))
    monkeypatch.setattr(seams, "engine_resets_lora", lambda: False)
    made: Any = cls(log)
    extend(made)
    model = Block()
    manager = SimpleNamespace(_adapter_manager=None)
    made.lora_reload = WorkerState(model, manager, torch.device("cpu"), Settings(), nothing_to_load(model))
    made.model_runner.lora = made.lora_reload.lora
    return made


@pytest.fixture
def worker(log: Log, monkeypatch: pytest.MonkeyPatch) -> Any:
    return make(SessionWorker, log, monkeypatch)


@pytest.fixture
def single_shot(log: Log, monkeypatch: pytest.MonkeyPatch) -> Any:
    return make(SingleShotWorker, log, monkeypatch)


def discard(worker: Any) -> None:
    """Sleep at level 2 and wake up again."""
    worker.sleep(2)
    worker.wake_up()
    assert worker.lora_reload_status()["state"] == "missing"
    worker.log.take()


# --- Loading the model --------------------------------------------------------------------------------------------


def test_load_model_extends_the_runner_first_and_shares_its_state() -> None:
    class Runner:
        pass

    class Worker:
        model_runner: Any = Runner()
        vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))

        def load_model(self, *, dummy: bool) -> None:
            assert isinstance(self.model_runner, LoRAReloadModelRunner) and isinstance(self.model_runner, Runner)
            self.model_runner.lora_reload = SimpleNamespace(dummy=dummy, started=lambda: started.append(dummy))

    started: list[bool] = []
    worker: Any = Worker()
    extend(worker)
    worker.load_model(dummy=True)
    assert worker.lora_reload is worker.model_runner.lora_reload and worker.lora_reload.dummy
    assert started == [True]


# --- Sleep and wake-up --------------------------------------------------------------------------------------------


def test_level_2_saves_before_it_sleeps(worker: Any, log: Log) -> None:
    worker.sleep(level=2)
    assert log == ["lora.save", "unregistered.save", "sleep 2"]
    assert worker.lora_reload_status()["state"] == "discarded"


@pytest.mark.parametrize("args", [(), (1,)])
def test_level_1_saves_nothing(worker: Any, log: Log, args: tuple[int, ...]) -> None:
    worker.sleep(*args)
    assert log == ["sleep 1"]
    assert worker.lora_reload_status()["state"] == "offloaded"


@pytest.mark.parametrize(("level", "state", "then"), [(1, "offloaded", "complete"), (2, "discarded", "missing")])
def test_a_sleep_that_breaks_off(level: int, state: str, then: str, worker: Any, log: Log) -> None:
    """vLLM unmaps one allocation after another, and some of its checks come after all of them."""
    worker.fail = f"sleep {level}"
    with pytest.raises(RuntimeError):
        worker.sleep(level)
    status = worker.lora_reload_status()
    assert status["state"] == state
    assert f"sleep(level={level}) broke off" in status["error"] and f"sleep {level} failed. Call" in status["error"]
    worker.wake_up()
    assert ("unregistered.restore" in log) is (level == 2)
    assert worker.lora_reload_status()["state"] == then
    assert "broke off" not in str(worker.lora_reload_status()["error"])


@pytest.mark.parametrize(("backend", "reached", "state"), [
    ("cumem", False, "complete"), ("cumem", True, "discarded"), ("other", False, "discarded"),
])  # fmt: skip
def test_a_sleep_that_fails_before_anything_is_unmapped(
    backend: str, reached: bool, state: str, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying buffers to the host, say."""

    class Allocator:
        def sleep(self, tags: Any) -> str:
            return f"{tags} unmapped"

    real, find = Allocator.sleep, seams._find
    platform = SimpleNamespace(is_cuda_alike=lambda: True)
    known = {"CuMemAllocator": Allocator, "current_platform": platform}
    monkeypatch.setattr(seams, "_find", lambda module, name: known.get(name) or find(module, name))
    worker.vllm_config.model_config.sleep_mode_backend = backend

    def do(what: str) -> None:
        if reached:
            assert Allocator().sleep("weights") == "weights unmapped"
        raise MemoryError(what)

    monkeypatch.setattr(worker, "_do", do)
    with pytest.raises(MemoryError):
        worker.sleep(2)
    assert worker.lora_reload_status()["state"] == state
    assert Allocator.sleep is real


def test_a_sleep_that_broke_off_is_not_tried_again(worker: Any) -> None:
    """vLLM would copy buffers from unmapped memory."""
    worker.fail = "sleep 2"
    with pytest.raises(RuntimeError):
        worker.sleep(2)
    worker.fail = None
    for level in (1, 2):
        with pytest.raises(AsleepError, match="wake_up"):
            worker.sleep(level)
    worker.wake_up()
    worker.sleep(2)


def test_what_cannot_be_kept_is_not_given_up(worker: Any, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is unmapped then."""

    def full() -> None:
        raise MemoryError

    monkeypatch.setattr(worker.lora_reload.unregistered, "save", full)
    with pytest.raises(MemoryError):
        worker.sleep(2)
    assert "sleep 2" not in log and worker.lora_reload_status() == COMPLETE


def test_no_level_2_from_level_1(worker: Any, log: Log) -> None:
    """What level 2 loses cannot be copied from there."""
    worker.sleep(1)
    with pytest.raises(AsleepError, match="sleeps at level 1"):
        worker.sleep(2)
    assert log == ["sleep 1"] and worker.lora_reload_status()["state"] == "offloaded"


def test_what_an_interrupt_leaves_the_next_wake_up_brings(
    worker: Any, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    worker.sleep(2)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(worker.lora_reload.unregistered, "restore", interrupted)
        worker.wake_up()
    assert worker.lora_reload_status()["state"] == "discarded"
    worker.wake_up()
    assert "unregistered.restore" in log and worker.lora_reload_status()["state"] == "missing"


@pytest.mark.parametrize("tags", [None, ["weights"], ["weights", "kv_cache"]])
def test_waking_weights_restores_after_level_2(worker: Any, log: Log, tags: list[str] | None) -> None:
    worker.sleep(2)
    log.take()
    worker.wake_up(tags)
    assert log == [f"wake {tags}", "unregistered.restore", "reset", "adapters.read_changed"]
    assert worker.lora_reload_status()["state"] == "missing"


@pytest.mark.parametrize("tags", [["kv_cache"], []])
def test_waking_something_else_touches_no_weights(worker: Any, log: Log, tags: list[str]) -> None:
    worker.sleep(2)
    log.take()
    worker.wake_up(tags)
    assert log.take() == [f"wake {tags}"]
    assert worker.lora_reload_status()["state"] == "discarded"
    worker.wake_up(["weights"])
    assert log == ["wake ['weights']", "unregistered.restore", "reset", "adapters.read_changed"]


@pytest.mark.parametrize("level", [0, 1])
def test_nothing_is_restored_after_level_1(worker: Any, log: Log, level: int) -> None:
    worker.sleep(level)
    worker.wake_up()
    restored = ["adapters.put_pending", "adapters.read_changed"] if level else ["adapters.absent"]
    assert log == [f"sleep {level}", "wake None", *restored]
    assert worker.lora_reload_status() == COMPLETE


def test_waking_twice_restores_once(worker: Any, log: Log) -> None:
    discard(worker)
    worker.wake_up()
    assert log == ["wake None", "adapters.absent"]


def test_level_1_while_missing_stays_missing_and_restores_nothing(worker: Any, log: Log) -> None:
    discard(worker)
    worker.sleep(1)
    worker.wake_up()
    assert log == ["sleep 1", "wake None", "adapters.put_pending", "adapters.read_changed"]
    assert worker.lora_reload_status()["state"] == "missing"


def test_setting_reload_loads_by_itself(worker: Any, log: Log) -> None:
    worker.lora_reload.settings = Settings(on_missing="reload")
    worker.model_runner.reload_weights = lambda: log("reload")
    worker.sleep(2)
    worker.wake_up(["kv_cache"])
    assert "reload" not in log
    worker.wake_up(["weights"])
    assert log[-2:] == ["adapters.read_changed", "reload"]
    log.take()
    worker.lora_reload.lifecycle.loaded()
    worker.sleep(1)
    worker.wake_up()
    assert "reload" not in log


def test_a_failed_wake_up_stays_discarded(worker: Any, log: Log) -> None:
    worker.sleep(2)
    log.take()
    worker.fail = "wake None"
    with pytest.raises(RuntimeError):
        worker.wake_up()
    assert log == ["wake None", "adapters.absent"]
    assert worker.lora_reload_status()["state"] == "discarded"


# --- A pool that others unmap ----------------------------------------------------------------------------------------


class Allocator:
    """As vLLM's, with the weights pool as one tensor."""

    def __init__(self) -> None:
        self.pool: list[torch.Tensor] = []

    def sleep(self, offload_tags: Any = None) -> None:
        if "weights" not in (offload_tags or ()):
            self.discard("weights")

    def discard(self, tags: Any) -> None:
        if "weights" in tags:
            for tensor in self.pool:
                tensor.view(-1).view(torch.uint8).fill_(0xFF)

    def wake_up(self, tags: Any = None) -> str:
        return f"{tags} mapped"


@pytest.fixture
def allocator(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    """That of a worker whose sleep and wake-up use it; a norm's table is lost with the pool."""
    made = Allocator()
    cls = type("CuMemAllocator", (Allocator,), {"get_instance": staticmethod(lambda: made)})
    made.__class__ = cls
    find = seams._find
    known = {"CuMemAllocator": cls, "current_platform": SimpleNamespace(is_cuda_alike=lambda: True)}
    monkeypatch.setattr(seams, "_find", lambda module, name: known.get(name) or find(module, name))
    worker.vllm_config.model_config.enable_sleep_mode = True
    model = worker.lora_reload.model
    worker.model_runner.model = model
    model.norm.register_buffer("table", torch.arange(3.0))
    made.pool = [model.norm.table.data]
    do = worker._do

    def drives(what: str) -> None:
        if what.startswith("sleep"):
            made.sleep(("weights",) if what == "sleep 1" else ())
        elif what.startswith("wake"):
            made.wake_up()
        do(what)

    monkeypatch.setattr(worker, "_do", drives)
    worker._stop_watching = seams.pool_watched(worker.vllm_config, worker._unmapping, worker._mapped)
    yield made
    worker._stop_watching()
    assert not {"sleep", "wake_up", "discard"} & vars(made).keys()


@pytest.mark.parametrize("call", [
    lambda allocator: allocator.sleep(offload_tags=()), lambda allocator: allocator.sleep(),
    lambda allocator: allocator.discard(("weights", "kv_cache")), lambda allocator: allocator.discard("weights"),
])  # fmt: skip
def test_a_pool_that_others_discard(worker: Any, log: Log, allocator: Allocator, call: Any) -> None:
    """As a framework does that has its own way to sleep: everything comes back as after a sleep of the worker."""
    call(allocator)
    assert log.take() == ["lora.save", "unregistered.save"]
    assert worker.lora_reload_status()["state"] == "discarded"
    with pytest.raises(AsleepError), worker.lora_reload.loading():
        pytest.fail("the load began")
    allocator.wake_up(["kv_cache"])
    assert worker.lora_reload_status()["state"] == "discarded"
    assert allocator.wake_up(["weights"]) == "['weights'] mapped"
    assert log == ["unregistered.restore", "reset"]
    assert worker.lora_reload_status()["state"] == "missing"
    assert worker.lora_reload.model.norm.table.tolist() == [0, 1, 2]


@pytest.mark.parametrize("call", [
    lambda allocator: allocator.sleep(("weights",)), lambda allocator: allocator.sleep("weights"),
])  # fmt: skip
def test_a_pool_that_others_offload(worker: Any, log: Log, allocator: Allocator, call: Any) -> None:
    call(allocator)
    assert worker.lora_reload_status()["state"] == "offloaded"
    allocator.wake_up()
    assert log == ["adapters.put_pending"] and worker.lora_reload_status() == COMPLETE


def test_others_may_give_up_the_cache_alone(worker: Any, log: Log, allocator: Allocator) -> None:
    """A request would reach memory that is not there, or wait for a wake-up that has been."""
    allocator.discard(["kv_cache"])
    assert log == [] and "the KV cache sleeps" in worker.lora_reload_status()["error"]
    allocator.wake_up(["kv_cache"])
    assert log == [] and worker.lora_reload_status() == COMPLETE
    allocator.sleep("weights")
    allocator.wake_up(["weights"])
    assert "the KV cache sleeps" in worker.lora_reload_status()["error"]
    worker.sleep(1)
    allocator.wake_up()
    assert worker.lora_reload_status() == COMPLETE


def test_a_rank_that_cannot_put_back_takes_part_in_what_others_decide(
    worker: Any, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for the logits mapping, say: the others would wait for it in their next decision."""

    def full() -> None:
        raise torch.OutOfMemoryError("full")

    worker.sleep(2)
    monkeypatch.setattr(worker.model_runner, "reset_lora_state", full)
    log.take()
    with pytest.raises(torch.OutOfMemoryError):
        worker.wake_up()
    assert log[-1] == "adapters.absent" and worker.lora_reload_status()["state"] == "missing"


def test_the_worker_s_own_sleep_is_noted_once(worker: Any, log: Log, allocator: Allocator) -> None:
    worker.sleep(2)
    worker.wake_up()
    assert log == [
        "lora.save", "unregistered.save", "sleep 2", "wake None", "unregistered.restore", "reset",
        "adapters.read_changed",
    ]  # fmt: skip


def test_a_worker_s_sleep_that_others_end(worker: Any, log: Log, allocator: Allocator) -> None:
    """vLLM's own copies of buffers are put back, which its wake-up would have done."""
    model = worker.lora_reload.model
    worker._sleep_saved_buffers = {"norm.table": model.norm.table.clone()}
    worker.sleep(2)
    log.take()
    allocator.wake_up()
    assert model.norm.table.tolist() == [0, 1, 2] and worker._sleep_saved_buffers == {}
    assert log.take() == ["unregistered.restore", "reset"] and worker.lora_reload_status()["state"] == "missing"
    worker.wake_up()
    assert log == ["wake None", "adapters.absent"]


def test_a_sleep_of_others_that_the_worker_ends(worker: Any, log: Log, allocator: Allocator) -> None:
    allocator.sleep()
    worker.wake_up()
    assert worker.lora_reload.model.norm.table.tolist() == [0, 1, 2]
    assert worker.lora_reload_status()["state"] == "missing"


def test_a_session_ends_before_others_discard_the_pool(worker: Any, log: Log, allocator: Allocator) -> None:
    worker.start_weight_update()
    log.take()
    allocator.sleep()
    assert log == ["abort", "lora.save", "unregistered.save"]
    assert worker.lora_reload.lifecycle.transfer is None


def test_an_allocator_that_breaks_off(worker: Any, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, tags: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(Allocator, "discard", broken)
    with pytest.raises(RuntimeError):
        allocator.sleep()
    assert "broke off" in worker.lora_reload_status()["error"]


# --- Weight transfer ----------------------------------------------------------------------------------------------


def test_session_runs_in_the_base_view_and_resets_once_at_the_end(worker: Any, log: Log) -> None:
    discard(worker)
    worker.start_weight_update(checkpoint=False)
    for chunk in (1, 2):
        worker.update_weights({"chunk": chunk})
        assert worker.lora_reload_status()["state"] == "missing"
    assert log.take()[1:] == ["update {'chunk': 1} in view", "update {'chunk': 2} in view"]
    worker.finish_weight_update()
    assert log == ["finish in view", "reset"]
    assert worker.lora_reload_status() == COMPLETE


@pytest.mark.parametrize("per_rank", [False, True])
def test_names_in_a_chunk_lose_base_layer(worker: Any, log: Log, per_rank: bool) -> None:
    """Kernel format and patches are looked up by name, with no ``load_weights`` in between."""
    given, wanted = ({"names": [name, "b"], "other": 1} for name in ("a.base_layer.weight", "a.weight"))
    worker.start_weight_update()
    worker.update_weights([given] if per_rank else given)
    assert log[-1] == f"update {[wanted] if per_rank else wanted} in view"
    assert given["names"][0] == "a.base_layer.weight"


@pytest.mark.parametrize("followed", [True, False])
def test_patch_brings_no_lost_tensor_back(worker: Any, followed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []

    @contextmanager
    def recording(anew: bool = False, counts: bool = True) -> Iterator[None]:
        yield
        recorded.append(counts)

    coverage = worker.lora_reload.coverage
    monkeypatch.setattr(coverage, "recording", recording)
    monkeypatch.setattr(type(coverage), "total", int(followed))
    monkeypatch.setattr(coverage, "missing", lambda: ["up.weight"])
    discard(worker)
    worker.start_weight_update()
    worker.update_weights({"names": ["up.weight"], "num_updates_list": [2]})
    assert recorded == [False]
    worker.finish_weight_update()
    assert worker.lora_reload_status()["state"] == "missing"
    worker.start_weight_update()
    monkeypatch.setattr(coverage, "missing", list)
    worker.update_weights({"names": ["up.weight"]})
    worker.finish_weight_update()
    assert worker.lora_reload_status()["state"] == "complete", "the next session is not a sparse one"


def test_start_passes_its_arguments_on(worker: Any, log: Log) -> None:
    worker.start_weight_update(checkpoint=False)
    assert log == ["start False"]


def test_engine_that_resets_by_itself_is_left_to_it(worker: Any, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "engine_resets_lora", lambda: True)
    discard(worker)
    worker.start_weight_update()
    worker.update_weights(1)
    worker.finish_weight_update()
    assert "reset" not in log
    assert worker.lora_reload_status()["state"] == "complete"


def test_draft_session_changes_nothing(worker: Any, log: Log) -> None:
    discard(worker)
    worker.start_draft_weight_update()
    worker.update_weights(1)
    worker.finish_weight_update()
    assert log == ["start draft", "update 1", "finish"]
    assert worker.lora_reload_status()["state"] == "missing"


def test_session_after_a_draft_session_is_a_full_one(worker: Any, log: Log) -> None:
    discard(worker)
    worker.start_draft_weight_update()
    worker.finish_weight_update()
    worker.start_weight_update()
    log.take()
    worker.update_weights(1)
    worker.finish_weight_update()
    assert log == ["update 1 in view", "finish in view", "reset"]
    assert worker.lora_reload_status()["state"] == "complete"


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("gives", [0, 1])
def test_failed_chunk(worker: Any, log: Log, gives: int, earlier: bool) -> None:
    """Missing if this chunk or an earlier one has written something; else nothing has changed."""
    worker.start_weight_update()
    if earlier:
        worker.gives = 1
        worker.update_weights(0)
    worker.fail, worker.gives = "update 1", gives
    with pytest.raises(RuntimeError, match="update 1 failed"):
        worker.update_weights(1)
    assert log[-1] == "abort" and "reset" not in log
    status = worker.lora_reload_status()
    if gives or earlier:
        assert status["state"] == "missing" and "RuntimeError: update 1 failed" in status["error"]
    else:
        assert status == COMPLETE


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("gives", [0, 1])
def test_a_sleep_ends_a_session(worker: Any, log: Log, gives: int, level: int) -> None:
    """Layers are back in their places before vLLM copies buffers, and the trainer is told to begin again."""
    worker._weight_update_active, worker.weight_transfer_engine = True, SimpleNamespace()
    worker.start_weight_update()
    worker.gives = gives
    worker.update_weights({})
    worker.gives = 0
    log.take()
    worker.sleep(level)
    saved = ["lora.save", "unregistered.save"] if level == 2 else []
    assert log.take() == ["abort", *saved, f"sleep {level}"] and not worker._weight_update_active
    worker.wake_up()
    status = worker.lora_reload_status()
    assert status["state"] == ("missing" if gives or level == 2 else "complete")
    if level == 1 and gives:
        assert "sleep(level=1) came before finish_weight_update" in status["error"]
    for step, call in (("update {}", lambda: worker.update_weights({})), ("finish", worker.finish_weight_update)):
        worker.fail = step  # as vLLM refuses it outside a session
        with pytest.raises(
            RuntimeError, match=rf"sleep\(level={level}\) has ended the session: call start_weight_update"
        ):
            call()
    worker.fail = None
    worker.start_weight_update()
    worker.update_weights({})
    worker.finish_weight_update()
    assert worker.lora_reload_status() == COMPLETE


def test_level_0_ends_no_session(worker: Any, log: Log) -> None:
    worker.start_weight_update()
    worker.sleep(0)
    assert "abort" not in log and worker.lora_reload_status()["state"] == "loading"


def test_a_sleep_ends_a_draft_session(worker: Any, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[Any] = []
    monkeypatch.setattr(seams, "abort_layerwise_reload", aborted.append)
    worker.get_draft_model = lambda: "draft"
    worker.start_draft_weight_update()
    worker.sleep(1)
    assert aborted == ["draft", worker.lora_reload.model]
    worker.wake_up()
    assert worker.lora_reload_status() == COMPLETE
    worker.sleep(1)
    with pytest.raises(AsleepError):
        worker.start_draft_weight_update()


def test_a_reload_that_fails_after_a_session_it_ended(worker: Any, log: Log) -> None:
    """The session has mixed new weights with old ones, though the reload itself has written nothing."""
    worker.start_weight_update()
    worker.gives = 1
    worker.update_weights({})
    with pytest.raises(AttributeError):  # there is nothing to reload with here
        worker.reload_weights()
    assert worker.lora_reload_status()["state"] == "missing"


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_no_request_is_to_reach_a_layer_that_is_apart(worker: Any, kind: str) -> None:
    """Status says so beside the error, as a request that queues until the session ends is all right."""
    model = worker.lora_reload.model
    real = model.norm.weight
    worker.start_weight_update()
    assert worker.lora_reload_status()["apart"] is None
    if kind == "parameter":
        model.norm.weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    else:
        model.norm.register_buffer("table", torch.empty(3, device="meta"))
    status = worker.lora_reload_status()
    assert status["error"] is None and "has taken layers of the model apart" in status["apart"]
    if kind == "parameter":
        model.norm.weight = real
    else:
        del model.norm.table
    worker.finish_weight_update()
    assert worker.lora_reload_status() == COMPLETE


def test_failed_finish_resets_nothing(worker: Any, log: Log) -> None:
    discard(worker)
    worker.start_weight_update()
    worker.fail = "finish"
    with pytest.raises(RuntimeError):
        worker.finish_weight_update()
    assert log[-2:] == ["finish in view", "abort"]
    status = worker.lora_reload_status()
    assert status["state"] == "missing" and "finish failed" in status["error"]


def test_failed_draft_chunk_is_not_about_base_weights(worker: Any, log: Log) -> None:
    worker.start_draft_weight_update()
    worker.fail = "update 1"
    with pytest.raises(RuntimeError):
        worker.update_weights(1)
    assert "abort" not in log
    assert worker.lora_reload_status() == COMPLETE


def test_a_session_that_does_not_begin_is_undone(worker: Any, log: Log) -> None:
    """It may have moved some layers to the meta device."""
    worker.fail = "start True"
    with pytest.raises(RuntimeError):
        worker.start_weight_update()
    assert log == ["start True", "abort"]
    assert worker.lora_reload_status() == COMPLETE


def test_a_second_start_undoes_nothing(worker: Any, log: Log) -> None:
    worker.start_weight_update()
    worker.fail = "start True"
    with pytest.raises(RuntimeError):
        worker.start_weight_update()
    assert "abort" not in log and worker.lora_reload_status()["state"] == "loading"


@pytest.mark.parametrize("target", [True, False])
@pytest.mark.parametrize("step", ["update {}", "finish"])
def test_a_session_that_fails_is_closed(target: bool, step: str, worker: Any) -> None:
    """Whatever a release keeps of it: the format up to 0.25, the target from 0.26."""
    reset: list[str] = []
    engine: Any = SimpleNamespace()
    if target:
        engine.reset_weight_update_target = lambda: reset.append("target")
    else:
        worker._is_checkpoint_format = False
    worker._weight_update_active, worker.weight_transfer_engine = True, engine
    worker.start_weight_update()
    worker.fail = step
    with pytest.raises(RuntimeError, match=f"{step} failed"):
        worker.update_weights({})
        worker.finish_weight_update()
    assert not worker._weight_update_active and reset == ["target"] * target
    assert target or worker._is_checkpoint_format


@pytest.mark.parametrize("by", ["session", "single shot"])
def test_tensors_that_would_be_broadcast_are_refused(by: str, worker: Any, single_shot: Any, log: Log) -> None:
    """In kernel format, before 0.26."""
    update: dict[str, Any] = {"names": ["up.base_layer.weight", "up.weight"], "shapes": [[3, 2], [1, 2]]}
    if by == "session":
        worker._weight_update_active = worker._is_checkpoint_format = True
        worker.weight_transfer_engine = SimpleNamespace()
        worker.start_weight_update()
        worker.update_weights(update)
        worker._is_checkpoint_format = False
        with pytest.raises(ValueError, match=r"up.weight has shape \[1, 2\]"):
            worker.update_weights(update)
        assert [entry for entry in log if entry.startswith("update")] == [f"update {PLAIN} in view"]
    else:
        single_shot.update_weights(update)
        with pytest.raises(ValueError, match=r"up.weight has shape \[1, 2\]"):
            single_shot.update_weights(update | {"is_checkpoint_format": False})
        assert [entry for entry in log if entry.startswith("update")] == [f"update {PLAIN} in view"]


def test_weights_that_are_zeroed_are_missing(
    log: Log, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    class Worker(SessionWorker):
        def reset_weights(self) -> None:
            self._do("zero")

    worker = make(Worker, log, monkeypatch)
    worker.reset_weights()
    assert log == ["unregistered.save", "zero", "unregistered.restore"]
    assert worker.lora_reload_status()["state"] == "missing"
    assert "reset_weights zeroed them" in worker.lora_reload_status()["error"]
    worker.sleep(1)
    with pytest.raises(AsleepError):
        worker.reset_weights()
    assert not hasattr(request.getfixturevalue("worker"), "reset_weights")


def test_a_load_ends_a_reset_of_lora_state_that_did_not(worker: Any, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was interrupted, and the weights come by the model's own `load_weights`."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    worker.sleep(2)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(worker.model_runner, "reset_lora_state", interrupted)
        worker.wake_up()
    log.take()
    with worker.lora_reload.loading():
        pass
    assert log == ["adapters.put_back"]


def test_single_shot_update_is_a_whole_load(single_shot: Any, log: Log) -> None:
    discard(single_shot)
    single_shot.update_weights(1)
    assert log == ["update 1 in view", "reset"]
    assert single_shot.lora_reload_status() == COMPLETE


def test_failed_single_shot_update(single_shot: Any, log: Log) -> None:
    single_shot.fail, single_shot.gives = "update 1", 1
    with pytest.raises(RuntimeError):
        single_shot.update_weights(1)
    assert log == ["update 1 in view", "abort"]
    assert single_shot.lora_reload_status()["state"] == "missing"


PLAIN = {"names": ["up.weight", "up.weight"], "shapes": [[3, 2], [1, 2]]}


# --- Status -------------------------------------------------------------------------------------------------------


def test_status_of_a_fresh_worker(worker: Any) -> None:
    assert worker.lora_reload_status() == COMPLETE


def test_status_says_what_requests_are_told(worker: Any) -> None:
    discard(worker)
    status = worker.lora_reload_status()
    worker.lora_reload.adapters.broken[7] = "why"
    assert worker.lora_reload_status()["adapters"] == {"7": "why"}
    assert status == COMPLETE | {"state": "missing", "error": worker.lora_reload.lifecycle.error(), "depth": 1}
    assert "sleep(level=2)" in status["error"]


@pytest.mark.parametrize("methods", [(), ("update_weights",), ("start_weight_update", "finish_weight_update")])
def test_no_method_that_the_release_lacks(methods: tuple[str, ...]) -> None:
    """Frameworks tell by ``hasattr`` what a worker can do."""
    worker: Any = type("Bare", (), {method: lambda self: None for method in methods})()
    extend(worker)
    transfer = ("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update")
    sessions = "finish_weight_update" in methods
    assert {m for m in transfer if hasattr(worker, m)} == set(methods) | ({"update_weights"} if sessions else set())


# --- Snapshots ----------------------------------------------------------------------------------------------------


class FakeKeeper:
    """Has what was lost, says `fail`, and whether the checkpoint has the same."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.usable = True
        self.lost_first = True
        self.reason = None
        self.fail: str | None = None
        self.held = False

    def hold(self) -> None:
        self.held = True

    def release(self, complete: bool) -> None:
        self.held &= not complete

    def started(self) -> None:
        self.log("keeper.started")

    def compare(self, complete: bool) -> None:
        self.log("keeper.compare" if complete else "keeper.compare not")

    def loaded(self) -> None:
        self.log("keeper.loaded")

    def restore(self) -> dict[str, Any]:
        self.log("keeper.restore")
        if self.fail:
            raise OSError(self.fail)
        return {"source": "snapshot", "bytes": 10, "seconds": 0.1, "verify_seconds": 0.0}

    def state(self) -> dict[str, Any]:
        return {"state": "valid"}

    def take(self) -> dict[str, Any]:
        return {"state": "valid", "path": "/file"}

    def holds(self) -> bool:
        return self.lost_first

    def close(self) -> None:
        self.log("keeper.close")


@pytest.fixture
def kept(worker: Any, log: Log) -> Any:
    """The worker, with a keeper and a checkpoint that has not changed."""
    worker.lora_reload.keeper = FakeKeeper(log)
    worker.lora_reload._checkpoint_files = list
    worker.lora_reload._files = {}
    worker.model_runner.reload_weights = lambda: log("reload")
    return worker


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "file_states", lambda files: {})
    monkeypatch.setattr(seams, "true_on_all_ranks", lambda value: value)


def test_wake_up_restores_the_snapshot(kept: Any, log: Log) -> None:
    kept.sleep(2)
    assert log.take() == ["lora.save", "unregistered.save", "keeper.compare", "sleep 2"]
    assert kept.lora_reload.keeper.held
    kept.wake_up(["weights"])
    assert log == ["wake ['weights']", "unregistered.restore", "reset", "adapters.read_changed", "keeper.restore"]
    status = kept.lora_reload_status()
    assert status["state"] == "complete" and status["last_restore"]["source"] == "snapshot"
    assert not kept.lora_reload.keeper.held
    kept.sleep(2)
    assert kept.lora_reload_status()["last_restore"] is None  # gone again


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("fails", ["to wake up", "earlier on another rank"])
def test_no_rank_waits_for_one_that_does_not_wake_up(
    fails: str, level: int, kept: Any, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes part in as many decisions as one that does, and says no."""
    decisions: list[bool] = []
    monkeypatch.setattr(seams, "true_on_all_ranks", lambda value: decisions.append(value) or value)
    kept.sleep(level)
    kept.wake_up(["kv_cache"])
    assert decisions == []
    kept.wake_up(["weights"])
    assert len(decisions) == 2 and "adapters.read_changed" in log
    decisions.clear()
    if fails == "to wake up":
        kept.sleep(level)
        kept.fail = "wake ['weights']"
    log.take()
    with pytest.raises(RuntimeError) if kept.fail else contextlib.nullcontext():
        kept.wake_up(["weights"])
    assert decisions == [False, False] and "adapters.absent" in log


@pytest.mark.parametrize("level", [0, 1])
def test_not_after_another_level(kept: Any, log: Log, level: int) -> None:
    kept.sleep(level)
    assert kept.lora_reload.keeper.held is (level == 1)
    kept.wake_up()
    assert not [entry for entry in log if "compare" in entry or "restore" in entry]
    assert not kept.lora_reload.keeper.held


def test_not_if_other_weights_were_lost(kept: Any, log: Log) -> None:
    kept.lora_reload.keeper.usable = kept.lora_reload.keeper.lost_first = False
    kept.sleep(2)
    kept.wake_up()
    assert "keeper.restore" not in log and "reload" not in log
    assert kept.lora_reload_status()["state"] == "missing" and kept.lora_reload.keeper.held


@pytest.mark.parametrize("elsewhere", [False, True])
def test_without_a_snapshot_the_checkpoint_is_loaded_if_all_ranks_have_the_same(
    kept: Any, log: Log, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bool] = []

    def true_on_all_ranks(value: bool) -> bool:
        said.append(value)
        return value and elsewhere

    monkeypatch.setattr(seams, "true_on_all_ranks", true_on_all_ranks)
    kept.lora_reload.keeper.usable = False
    kept.sleep(2)
    kept.wake_up()
    assert said == [False, True] and "keeper.restore" not in log and ("reload" in log) is elsewhere
    error = kept.lora_reload_status()["error"]
    assert "no snapshot has them: it was not written yet" in error
    assert ("nor does the checkpoint" in error) is not elsewhere


@pytest.mark.parametrize("checkpoint", ["same", "other weights", "changed", "not local", "gone"])
def test_the_checkpoint_is_loaded_instead_only_if_it_has_the_same(
    kept: Any, log: Log, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.lora_reload.keeper.fail = "no such file"
    kept.lora_reload.keeper.lost_first = checkpoint != "other weights"
    if checkpoint == "changed":
        monkeypatch.setattr(session, "file_states", lambda folder: {"file": (1, 2, 3)})
    elif checkpoint == "gone":
        kept.lora_reload._checkpoint_files = lambda: [Path("/gone")]
        monkeypatch.setattr(session, "file_states", file_states)
    elif checkpoint == "not local":
        kept.lora_reload._files = None
    kept.sleep(2)
    kept.wake_up()
    assert ("reload" in log) is (checkpoint == "same")
    assert "the snapshot could not be restored: OSError: no such file" in kept.lora_reload_status()["error"]


@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.parametrize("same", [False, True], ids=["no rank has the same", "the checkpoint has the same"])
def test_a_rank_whose_neighbour_failed_goes_its_way(
    kept: Any, log: Log, same: bool, by_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaders may be collectives, and adapters are to be the same everywhere."""
    answers = iter([False, same])
    monkeypatch.setattr(seams, "true_on_all_ranks", lambda value: next(answers) and value)
    kept.lora_reload.settings = Settings(on_missing="reload" if by_itself else "refuse")
    kept.sleep(2)
    kept.wake_up()
    assert "keeper.restore" in log and ("reload" in log) is (same or by_itself)
    status = kept.lora_reload_status()
    assert status["state"] == "missing" and status["last_restore"] is None
    assert "another rank has none that could be read" in status["error"]


def test_ranks_meet_as_often_whatever_they_have(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load may have failed on this rank alone; the others wait for it as ever, and it stays without weights."""
    said: list[bool] = []
    monkeypatch.setattr(seams, "true_on_all_ranks", lambda value: said.append(value) or True)
    with pytest.raises(RuntimeError), kept.lora_reload.loading():
        write(kept.lora_reload)
        raise RuntimeError
    kept.sleep(1)
    kept.wake_up()
    assert kept.lora_reload_status()["state"] == "missing" and said == [False, False]


def test_only_what_was_complete_can_be_restored(kept: Any, log: Log) -> None:
    """A load failed before the sleep: nobody knows what it had written."""
    with pytest.raises(RuntimeError), kept.lora_reload.loading():
        write(kept.lora_reload)
        raise RuntimeError
    kept.sleep(2)
    assert "keeper.compare" not in log and "keeper.compare not" in log


def test_adapters_are_dropped_as_after_a_load_if_asked(kept: Any, log: Log) -> None:
    kept.lora_reload.settings = Settings(adapters="drop")
    parts: Any = kept.lora_reload.adapters
    parts.drop_all = lambda: log("drop")
    parts.put_back = lambda: log("put back")
    kept.sleep(2)
    kept.wake_up()
    assert log[-3:] == ["keeper.restore", "drop", "put back"]


def test_a_load_at_wake_up_does_not_ask_the_other_ranks(kept: Any, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """After level 1 this rank may be the only one that has to."""
    kept.lora_reload.settings = Settings(on_missing="reload")
    with pytest.raises(RuntimeError), kept.lora_reload.loading():
        write(kept.lora_reload)
        raise RuntimeError
    asked: list[bool] = []
    monkeypatch.setattr(seams, "true_on_all_ranks", lambda value: asked.append(value) or value)
    kept.model_runner.reload_weights = lambda: log(f"reload {kept.lora_reload.has_checkpoint()}")
    kept.sleep(1)
    kept.wake_up()
    assert "reload False" in log and len(asked) == 2  # at the wake-up, as all do
    kept.lora_reload.has_checkpoint()
    assert len(asked) == 3


@pytest.mark.parametrize("elsewhere", [True, False])
def test_nothing_to_load_only_if_so_on_every_rank(kept: Any, elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "true_on_all_ranks", lambda value: value and elsewhere)
    assert kept.lora_reload.has_checkpoint() is elsewhere
    kept.lora_reload._all_on_device = False  # digests say nothing about what is elsewhere
    assert not kept.lora_reload.has_checkpoint()


def test_files_that_changed_during_the_load_are_not_what_was_loaded(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    monkeypatch.setattr(session, "LoRAState", lambda *args: FakePart(log, "lora"))
    monkeypatch.setattr(session, "Adapters", lambda *args: FakePart(log, "adapters"))
    monkeypatch.setattr(session, "UnregisteredTensors", lambda *args, known, more: FakePart(log, "unregistered"))
    monkeypatch.setattr(session, "file_states", lambda files: {Path("a"): (1, 1, 1)})
    for before, unchanged in (({Path("a"): (1, 1, 1)}, True), ({Path("a"): (1, 0, 1)}, False), (None, False)):
        manager = SimpleNamespace(_adapter_manager=None)
        state = WorkerState(Block(), manager, torch.device("cpu"), Settings(), files=list, before=before)
        assert state._checkpoint_unchanged() is unchanged


def test_a_load_holds_the_writer_up(kept: Any, log: Log) -> None:
    keeper = kept.lora_reload.keeper
    with kept.lora_reload.loading():
        assert keeper.held
    assert not keeper.held and log == ["keeper.loaded"]
    log.take()
    with pytest.raises(RuntimeError), kept.lora_reload.loading():
        write(kept.lora_reload)
        raise RuntimeError
    assert keeper.held and "keeper.loaded" not in log  # nobody knows what memory holds now


def test_a_transfer_session_holds_it_up_to_its_end(kept: Any, log: Log) -> None:
    keeper = kept.lora_reload.keeper
    kept.start_weight_update()
    assert keeper.held
    kept.update_weights({})
    assert keeper.held
    kept.finish_weight_update()
    assert not keeper.held
    assert log.count("keeper.loaded") == 1


def test_a_sleep_that_breaks_off_lets_it_go_on_after_the_wake_up(kept: Any) -> None:
    kept.fail = "sleep 1"
    with pytest.raises(RuntimeError):
        kept.sleep(1)
    assert kept.lora_reload.keeper.held
    kept.wake_up()
    assert not kept.lora_reload.keeper.held


def test_looks_for_a_snapshot_after_warm_up(kept: Any, log: Log) -> None:
    assert kept.compile_or_warm_up_model() == "warm"
    assert log == ["warm up", "keeper.started"]


def test_closes_with_the_worker(kept: Any, log: Log) -> None:
    kept.shutdown()
    assert log == ["keeper.close", "shutdown"]


def test_a_worker_without_a_model_shuts_down(log: Log) -> None:
    worker: Any = SessionWorker(log)
    extend(worker)
    worker.shutdown()
    assert log == ["shutdown"]


def test_snapshots_by_rpc(kept: Any, worker: Any) -> None:
    assert kept.lora_reload_take_snapshot() == {"state": "valid", "path": "/file"}
    assert kept.lora_reload_status()["snapshot"] == {"state": "valid"}
    kept.lora_reload.keeper = None
    assert kept.lora_reload_take_snapshot()["reason"] == "the setting snapshot_dir is empty"


def test_buffers_are_freed_by_rpc(worker: Any) -> None:
    worker.lora_reload.ring.prepare()
    size = worker.lora_reload_status()["ring_bytes"]
    assert size > 0 and worker.lora_reload_free_buffers() == size
    assert worker.lora_reload_status()["ring_bytes"] == 0
