"""Calls to several workers: vLLM's own ``collective_rpc`` on queues that need no processes."""

import threading
import time
from collections import deque
from typing import Any

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from vllm_lora_reload import replies, seams

SUCCESS, FAILURE = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE
LATE = "late"


class Queue:
    """What a rank has replied; `TimeoutError` where vLLM's queue would wait."""

    def __init__(self) -> None:
        self.replies: deque[Any] = deque()
        self.late: deque[Any] = deque()
        self.waits: list[float | None] = []
        self.error: Exception | None = None

    def dequeue(self, timeout: float | None = None, cancel: Any = None) -> Any:
        self.waits.append(timeout)
        if self.error:
            raise self.error
        if not self.replies:
            assert timeout is not None, "waits for a reply that nobody sends"
            raise TimeoutError
        return self.replies.popleft()

    def comes(self) -> None:
        """What was late is there."""
        self.replies.extend(self.late)
        self.late.clear()


class Workers:
    """The queue that calls go out on; replies come at once, or with `Queue.comes`."""

    def __init__(self, ranks: int) -> None:
        self.queues = [Queue() for _ in range(ranks)]

    def enqueue(self, call: Any) -> None:
        method, args, _, output_rank = call
        if method == "unpicklable":
            raise TypeError("cannot pickle")
        for rank, queue in enumerate(self.queues):
            if output_rank in (None, rank):
                does = args[rank] if method == "each" else f"{method} {rank}"
                to, does = (queue.late, does[1]) if isinstance(does, tuple) else (queue.replies, does)
                to.append((FAILURE, str(does)) if isinstance(does, Exception) else (SUCCESS, does))


def make(ranks: int = 3, apart: bool = True) -> tuple[Any, list[Queue]]:
    executor: Any = object.__new__(MultiprocExecutor)
    workers = Workers(ranks)
    executor.is_failed = False
    executor.shutdown_event = threading.Event()  # older releases
    executor.futures_queue = deque()
    executor.rpc_broadcast_mq, executor.response_mqs = workers, list(workers.queues)
    if apart:
        replies.keep_apart(executor)
    return executor, workers.queues


def each(executor: Any, *does: Any, **how: Any) -> Any:
    """One call, of which rank n returns ``does[n]``, or raises it, or gives ``(LATE, reply)`` later."""
    return executor.collective_rpc("each", args=does, **how)


def status(executor: Any) -> Any:
    return executor.collective_rpc("status")


ALL = ["status 0", "status 1", "status 2"]


def test_vllm_alone_mixes_replies_up() -> None:
    """Why all this is here."""
    executor, _ = make(apart=False)
    with pytest.raises(RuntimeError, match="no shard a"):
        each(executor, OSError("no shard a"), OSError("no shard b"), "loaded")
    with pytest.raises(RuntimeError, match="no shard b"):
        status(executor)


@pytest.mark.parametrize("failing", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
def test_failure_takes_all_replies_along(failing: list[int]) -> None:
    executor, queues = make()
    for _ in range(12):  # vLLM's queues hold ten
        does = [OSError(f"no shard {rank}") if rank in failing else "loaded" for rank in range(3)]
        with pytest.raises(RuntimeError) as failure:
            each(executor, *does)
        assert type(failure.value) is RuntimeError
        assert str(failure.value).startswith(f"Worker failed with error 'no shard {failing[0]}', please check")
        assert not any(queue.replies for queue in queues)
    assert status(executor) == ALL
    assert executor.collective_rpc("status", unique_reply_rank=2) == "status 2"


def test_late_reply_is_waited_for_in_vain_and_dropped_when_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "PATIENCE", 0.2)
    executor, queues = make()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="no shard"):
        each(executor, OSError("no shard"), (LATE, "loaded"), (LATE, OSError("no shard either")))
    assert time.monotonic() - start < 1
    waits = [queue.waits for queue in queues]
    assert [len(each) for each in waits] == [1, 1, 1] and waits[0] == [None]
    assert all(wait is not None and 0 <= wait <= 0.2 for (wait,) in waits[1:])
    for queue in queues:
        queue.comes()
    assert executor.collective_rpc("status", unique_reply_rank=2) == "status 2"
    assert status(executor) == ALL
    assert not any(queue.replies for queue in queues)


def test_several_late_replies() -> None:
    executor, queues = make(2)
    for number in range(3):
        with pytest.raises(RuntimeError, match=f"no shard {number}"):
            each(executor, OSError(f"no shard {number}"), (LATE, f"loaded {number}"))
    queues[1].comes()
    assert status(executor) == ALL[:2]


def test_call_that_timed_out_leaves_nothing_behind() -> None:
    executor, queues = make(2)
    with pytest.raises(TimeoutError, match="RPC call to each timed out"):
        each(executor, (LATE, "loaded"), "loaded", timeout=0.01)
    queues[0].comes()
    assert executor.collective_rpc("status", timeout=5) == ALL[:2]
    assert all(wait is None or 0 <= wait <= 5 for queue in queues for wait in queue.waits)


@pytest.mark.parametrize("error", [RuntimeError("cancelled"), EOFError()])
def test_broken_queue_does_not_hide_the_failure(error: Exception) -> None:
    executor, queues = make()
    queues[1].error = error
    with pytest.raises(RuntimeError, match="no shard"):
        each(executor, OSError("no shard"), "loaded", "loaded")
    assert not queues[2].replies


def test_no_queue_is_asked_to_wait_less_than_no_time() -> None:
    """Sockets, which replies of other hosts come through, take that as for ever."""
    queue = Queue()
    with pytest.raises(TimeoutError):
        replies.Replies(queue).take(1, -1.0)
    assert queue.waits == [0.0]


def test_reply_that_cannot_be_unpickled_is_off_the_queue_too() -> None:
    executor, queues = make(2)
    queues[0].error = EOFError()
    with pytest.raises(EOFError):
        each(executor, "loaded", "loaded")
    queues[0].error = None
    queues[0].replies.popleft()
    assert status(executor) == ALL[:2]


def test_pending_calls_keep_their_replies() -> None:
    executor, queues = make()
    pending = [
        each(executor, "a", "b", "c", non_block=True),
        each(executor, OSError("no shard"), OSError("x"), OSError("y"), non_block=True),
        executor.collective_rpc("step", unique_reply_rank=1, non_block=True),
    ]
    with pytest.raises(TypeError, match="cannot pickle"):
        executor.collective_rpc("unpicklable")
    with pytest.raises(RuntimeError, match="no shard either"):
        each(executor, "loaded", OSError("no shard either"), "loaded")
    assert pending[0].result() == ["a", "b", "c"]
    with pytest.raises(RuntimeError, match="no shard"):
        pending[1].result()
    assert pending[2].result() == "step 1"
    assert status(executor) == ALL
    assert not any(queue.replies for queue in queues)


def test_aggregated_replies_are_those_of_all_ranks() -> None:
    class Aggregator:
        def aggregate(self, outputs: list[Any], output_rank: int) -> Any:
            return outputs, output_rank

    executor, queues = make()
    kwargs = {"unique_reply_rank": 2, "kv_output_aggregator": Aggregator()}
    with pytest.raises(RuntimeError, match="boom"):
        each(executor, "a", RuntimeError("boom"), "c", **kwargs)
    assert each(executor, "a", "b", "c", **kwargs) == (["a", "b", "c"], 2)
    assert not any(queue.replies for queue in queues)


def test_call_of_another_form_is_left_to_vllm() -> None:
    executor, queues = make(2)
    for rank in (7, "all"):
        status(executor)
        executor.rpc_broadcast_mq.enqueue(("method", (), {}, rank))
        assert executor.response_mqs == queues


def test_what_else_is_done_to_a_queue_reaches_it() -> None:
    executor, queues = make(2)
    status(executor)
    assert executor.response_mqs[1] is not queues[1]
    assert executor.response_mqs[1].replies is queues[1].replies
    queues[0].replies.append((SUCCESS, "more"))
    assert executor.response_mqs[0].dequeue(timeout=1, cancel=None) == (SUCCESS, "more")


def test_failures_are_told_from_other_replies() -> None:
    assert seams.is_failure((FAILURE, "why"))
    assert not any(seams.is_failure(reply) for reply in ((SUCCESS, "FAILURE"), ("FAILURE", 1), None, "FAILURE"))
