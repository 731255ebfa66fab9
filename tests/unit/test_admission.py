"""The engine core's part: who is let in, what is asked when, and what becomes of a request that cannot run."""

from __future__ import annotations

import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from vllm_lora_reload import AdapterMissingError, WeightsMissingError, door, lifecycle, seams

COMPLETE = {"state": "complete", "error": None, "waits": False, "depth": 0, "apart": None, "adapters": {}}
MISSING = COMPLETE | {"state": "missing", "error": "base weights are missing: told so", "depth": 1}
ASLEEP = COMPLETE | {"state": "discarded", "error": "the engine sleeps at level 2", "depth": 2}
OFFLOADED = COMPLETE | {"state": "offloaded", "error": "the engine sleeps at level 1", "waits": True, "depth": 2}
ELSEWHERE = MISSING | {"error": "base weights are missing: another rank has none", "depth": 0}
ASK, ADMIT = "lora_reload_status", "lora_reload_admit"


def admitted(why: str | None = None, changed: bool = False, held: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    return {"why": why, "changed": changed, "held": list(held)}


class Request:
    def __init__(self, request_id: str, lora: Any = None, client: int = 0) -> None:
        self.request_id, self.lora_request, self.client_index = request_id, lora, client
        self.num_computed_tokens = 0

    def is_finished(self) -> bool:
        return False


class Scheduler:
    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.paused = False

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests) and not self.paused

    def finish_requests(self, ids: list[str], status: Any) -> None:
        assert status.name == "FINISHED_ERROR"
        for each in ids:
            self.requests.pop(each, None)


class Executor:
    """Notes what it is asked. Workers answer what `answers` holds."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.answers: dict[str, Any] = {ASK: [COMPLETE], ADMIT: [admitted()]}

    def collective_rpc(self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(method)
        answer = self.answers.get(method, [None])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


class Core:
    """In process."""

    vllm_config = SimpleNamespace(additional_config={})

    def __init__(self) -> None:
        self.scheduler, self.model_executor = Scheduler(), Executor()
        self.step_fn: Callable[[], Any] = lambda: ({7: "answers"}, True)

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        self.scheduler.requests[request.request_id] = request

    def is_scheduler_paused(self) -> bool:
        return self.scheduler.paused

    def sleep(self, level: int = 1, mode: str = "abort") -> str:
        return f"slept {level} {mode}"


class CoreProc(Core):
    """In a process of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.output_queue: queue.Queue[Any] = queue.Queue()


def lora(number: int = 1, path: str = "/a", inplace: bool = False) -> Any:
    made = seams.lora_request(f"name {number}", number, path)
    made.load_inplace = inplace
    return made


@pytest.fixture(params=[Core, CoreProc])
def core(request: pytest.FixtureRequest) -> Any:
    core = request.param()
    door.guard_core(core)
    return core


def refusal(core: Any, request: Request) -> str:
    """What the one who has sent it is told."""
    if not isinstance(core, CoreProc):
        with pytest.raises((WeightsMissingError, AdapterMissingError)) as refused:
            core.add_request(request)
        assert vars(refused.value)["request_id"] == request.request_id
        return str(refused.value)
    core.add_request(request)
    client, outputs = core.output_queue.get_nowait()
    (output,) = outputs.outputs
    assert client == request.client_index and outputs.finished_requests == {request.request_id}
    assert output.finish_reason == FinishReason.ERROR and output.new_token_ids == []
    return str(door.unpacked(output))


def test_an_engine_that_never_sleeps_is_asked_nothing(core: Any) -> None:
    for number in range(3):
        core.add_request(Request(str(number)))
        assert core.step_fn() == ({7: "answers"}, True)
    assert core.model_executor.calls == [] and len(core.scheduler.requests) == 3


@pytest.mark.parametrize("method", ["sleep", "wake_up", "reload_weights", "add_lora", "lora_reload_commit_adapter"])
def test_asked_once_after_what_can_matter(core: Any, method: str) -> None:
    for _ in range(2):
        core.model_executor.collective_rpc(method)
    core.model_executor.take()
    for name in "ab":
        core.add_request(Request(name))
        core.step_fn()
    assert core.model_executor.take() == [ASK]


@pytest.mark.parametrize("method", ["execute_model", "sample_tokens", ASK, "lora_reload_adapters", "list_loras"])
def test_what_changes_nothing_is_not_asked_about(core: Any, method: str) -> None:
    core.model_executor.collective_rpc(method)
    core.add_request(Request("a"))
    assert core.model_executor.take() == [method]


def test_a_failed_call_is_asked_about_too(core: Any) -> None:
    core.model_executor.answers["reload_weights"] = RuntimeError("half way")
    with pytest.raises(RuntimeError):
        core.model_executor.collective_rpc("reload_weights")
    core.model_executor.answers[ASK] = [MISSING]
    assert "told so" in refusal(core, Request("a"))


def test_a_load_that_fails_in_this_process_is_asked_about(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core.model_executor.answers[ASK] = [MISSING]
    monkeypatch.setattr(lifecycle, "failures", lifecycle.failures + 1)
    assert "told so" in refusal(core, Request("a"))


def test_refused_until_it_is_right(core: Any) -> None:
    core.model_executor.collective_rpc("wake_up")
    core.model_executor.answers[ASK] = [MISSING]
    for name in "ab":
        assert refusal(core, Request(name, client=3)) == "rank 0: base weights are missing: told so"
    core.model_executor.answers[ASK] = [COMPLETE]  # by a load that passed no call
    core.add_request(Request("c"))
    assert list(core.scheduler.requests) == ["c"]


@pytest.mark.parametrize("answer", [None, "did it", {}, {"error": None}, {"error": None, "adapters": 7}])
def test_what_is_no_status_is_asked_again(core: Any, answer: Any) -> None:
    core.model_executor.collective_rpc("wake_up")
    core.model_executor.answers[ASK] = [COMPLETE, answer]
    assert "rank 1: asked how its weights stand, this worker said (" in refusal(core, Request("a"))
    core.model_executor.answers[ASK] = [COMPLETE, COMPLETE]
    core.add_request(Request("b"))


def test_a_question_that_fails_ends_no_core(core: Any) -> None:
    core.model_executor.collective_rpc("wake_up")
    core.model_executor.answers[ASK] = TimeoutError("busy")
    assert "TimeoutError: busy" in refusal(core, Request("a"))


@pytest.mark.parametrize(
    ("statuses", "message"),
    [
        ([COMPLETE, MISSING], f"rank 1: {MISSING['error']}"),
        ([MISSING, MISSING, COMPLETE], f"rank 0: {MISSING['error']} (and 1 more ranks)"),
        ([MISSING, ASLEEP], f"rank 1: {ASLEEP['error']} (and 1 more ranks)"),
        ([ELSEWHERE, MISSING], f"rank 1: {MISSING['error']} (and 1 more ranks)"),
        ([ELSEWHERE, ASLEEP], f"rank 1: {ASLEEP['error']} (and 1 more ranks)"),
        ([OFFLOADED, ASLEEP], f"rank 1: {ASLEEP['error']} (and 1 more ranks)"),
    ],
)
def test_the_rank_with_the_deepest_cause_shows(statuses: list[Any], message: str) -> None:
    assert door.verdict(statuses).error == message


@pytest.mark.parametrize(("status", "runs"), [(MISSING, True), (ASLEEP, False), (OFFLOADED, False)])
def test_with_a_warning_nothing_runs_in_memory_that_is_not_there(core: Any, status: Any, runs: bool) -> None:
    core.lora_reload.warn_only = True
    core.model_executor.collective_rpc("sleep")
    core.model_executor.answers[ASK] = [status]
    if runs:
        core.add_request(Request("a"))
        assert list(core.scheduler.requests) == ["a"]
    else:
        assert status["error"] in refusal(core, Request("a"))


def test_those_that_wait_while_an_adapter_is_swapped_begin_anew(core: Any) -> None:
    """Their marks are those of the weights before, which have cached prefixes."""
    first, second, base = Request("a", lora(3)), Request("b", lora(3)), Request("c")
    for request in (first, second, base):
        core.add_request(request)
    second.num_computed_tokens = 5
    core.model_executor.collective_rpc("lora_reload_commit_adapter")
    assert first.skip_reading_prefix_cache and not hasattr(second, "skip_reading_prefix_cache")
    assert not hasattr(base, "skip_reading_prefix_cache")


def test_an_adapters_own_trouble_shows_before_another_ranks() -> None:
    found = door.verdict(
        [COMPLETE | {"adapters": {"3": "another rank could not read them"}}, COMPLETE | {"adapters": {"3": "cut off"}}]
    )
    assert found.adapters == {3: "rank 1: cut off"} and found.error is None
    assert door.verdict([COMPLETE | {"adapters": {"3": "cut off"}}]).adapters == {3: "cut off"}


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("status", [OFFLOADED, ASLEEP])
def test_only_level_1_is_waited_for_and_only_where_somebody_can_end_it(core: Any, status: Any, paused: bool) -> None:
    core.scheduler.paused = paused
    core.model_executor.collective_rpc("sleep")
    core.model_executor.answers[ASK] = [status]
    if paused and status is OFFLOADED and isinstance(core, CoreProc):
        core.add_request(Request("a"))
        assert list(core.scheduler.requests) == ["a"]
        assert core.step_fn() == ({7: "answers"}, True), "vLLM's own step runs nothing while it is paused"
        core.scheduler.paused = False
        outputs, ran = core.step_fn()
        assert not ran and "sleeps at level 1" in str(door.unpacked(outputs[0].outputs[0]))
    else:
        assert "sleeps at level" in refusal(core, Request("a"))
    assert core.scheduler.requests == {}


def test_ranks_that_disagree_about_a_sleep_are_not_waited_for() -> None:
    assert door.verdict([OFFLOADED, OFFLOADED]).waits
    assert not door.verdict([OFFLOADED, MISSING]).waits


def test_whatever_is_in_the_engine_runs_only_on_weights(core: Any) -> None:
    for number, name in enumerate("abc"):
        core.add_request(Request(name, client=number % 2))
    core.model_executor.collective_rpc("wake_up")
    core.model_executor.answers[ASK] = [MISSING]
    outputs, ran = core.step_fn()
    assert not ran and core.scheduler.requests == {}
    assert {client: [each.request_id for each in of.outputs] for client, of in outputs.items()} == {
        0: ["a", "c"],
        1: ["b"],
    }
    assert all("told so" in str(door.unpacked(each)) for of in outputs.values() for each in of.outputs)
    assert core.step_fn() == ({7: "answers"}, True)


def test_a_broken_adapter_ends_its_own_requests(core: Any) -> None:
    for name, request in (("a", lora(1)), ("b", lora(2)), ("c", None)):
        core.add_request(Request(name, request))
    core.model_executor.collective_rpc("wake_up")
    core.model_executor.answers[ASK] = [COMPLETE | {"adapters": {"2": "cut off"}}]
    outputs, _ = core.step_fn()
    assert [each.request_id for each in outputs[0].outputs] == ["b"] and list(core.scheduler.requests) == ["a", "c"]
    assert isinstance(door.unpacked(outputs[0].outputs[0]), AdapterMissingError)
    assert core.step_fn() == ({7: "answers"}, True)
    assert "cut off" in refusal(core, Request("d", lora(2)))


def test_adapters_are_brought_once(core: Any) -> None:
    for name, request in (("a", lora(1)), ("b", lora(1)), ("c", lora(2)), ("d", lora(1, "/other"))):
        core.add_request(Request(name, request))
    assert core.model_executor.take() == [ADMIT] * 3
    core.model_executor.collective_rpc("remove_lora")
    core.add_request(Request("e", lora(1, "/other")))
    assert core.model_executor.take() == ["remove_lora", ASK, ADMIT]


def test_adapters_that_a_worker_does_not_hold_are_brought_again(core: Any) -> None:
    core.model_executor.answers[ADMIT] = [admitted(), admitted(held=(2,))]
    for number in (1, 2, 2, 1):
        core.add_request(Request("a", lora(number)))
    assert core.model_executor.take() == [ADMIT] * 3


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([admitted(), admitted(why="cut off")], "rank 1: cut off"),
        (RuntimeError("no"), "RuntimeError: no"),
    ],
)
def test_an_adapter_that_cannot_be_brought(core: Any, answers: Any, said: str) -> None:
    core.model_executor.answers[ADMIT] = answers
    assert f"adapter 'name 1' is not there: {said}" in refusal(core, Request("a", lora()))
    core.add_request(Request("b"))


def test_files_that_changed_are_read_on_all_workers_or_none(core: Any) -> None:
    executor = core.model_executor
    executor.answers[ADMIT] = [admitted(), admitted(changed=True)]
    executor.answers["lora_reload_stage_adapter"] = [None, "ValueError: bad"]
    assert "rank 1: ValueError: bad" in refusal(core, Request("a", lora(inplace=True)))
    assert executor.take() == [ADMIT, "lora_reload_stage_adapter", "lora_reload_discard_adapter"]
    executor.answers["lora_reload_stage_adapter"] = [None, None]
    request = Request("b", lora(inplace=True))
    core.add_request(request)
    assert executor.take() == [ADMIT, "lora_reload_stage_adapter", "lora_reload_commit_adapter"]
    assert request.lora_request.load_inplace is False, "else vLLM would read them before every step"


def test_requests_of_a_frameworks_own_kind_stay_as_they_are(core: Any) -> None:
    class WithTensors(type(lora())):  # type: ignore[misc]
        pass

    request = Request("a", WithTensors(lora_name="a", lora_int_id=1, lora_path="/a", load_inplace=True))
    core.add_request(request)
    assert request.lora_request.load_inplace is True


def test_requests_are_kept_only_over_what_keeps_weights(core: Any) -> None:
    assert core.sleep(2, "keep") == core.sleep(level=2, mode="keep") == "slept 2 keep"
    core.add_request(Request("a"))
    for call in (lambda: core.sleep(2, "keep"), lambda: core.sleep(level=2, mode="keep")):
        with pytest.raises(ValueError, match="kept over"):
            call()
    assert core.sleep() == "slept 1 abort" and core.sleep(1, "keep") == "slept 1 keep"


def test_in_lockstep_others_may_have_begun_to_step() -> None:
    """So the engine takes the request, as far as its partners are concerned."""

    class InStep(CoreProc):
        dp_group = "others"

        def add_request(self, request: Request, request_wave: int = 0) -> None:
            super().add_request(request)
            taken.append(f"{request.request_id} {request_wave}")

    taken: list[str] = []
    core: Any = InStep()
    door.guard_core(core)
    core.model_executor.collective_rpc("wake_up")
    core.model_executor.answers[ASK] = [MISSING]
    core.add_request(Request("a"), 5)
    assert taken == ["a 5"] and core.scheduler.requests == {}
    assert "told so" in str(door.unpacked(core.output_queue.get_nowait()[1].outputs[0]))


def test_warn_only_answers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    core: Any = CoreProc()
    core.vllm_config = SimpleNamespace(additional_config={"lora_reload": {"on_missing": "warn"}})
    door.guard_core(core)
    core.model_executor.collective_rpc("wake_up")
    core.model_executor.answers[ASK] = [MISSING]
    core.add_request(Request("a"))
    assert core.step_fn() == ({7: "answers"}, True) and list(core.scheduler.requests) == ["a"]
