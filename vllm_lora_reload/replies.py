"""Replies of workers, kept apart by the call that they answer.

vLLM's executor for several workers broadcasts a call and takes every worker's reply off a queue of its own, in rank
order, up to the first failure. Replies carry no number: those of later ranks stay behind, and each of these ranks then
answers all later calls one call late. A load that fails on two ranks would be survived by neither.

Here each call knows which reply of every queue is its own. A failure takes the others' replies along; one that does not
come in time (the rank hangs, or the whole call timed out) is dropped when it comes.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from . import seams

PATIENCE = 5.0  # seconds that a failure waits for the other ranks, so that its caller finds none of them at work


def keep_apart(executor: Any) -> None:
    """Make calls of `executor` take their own replies only. Executors without queues of replies stay as they are."""
    ranks = [Replies(queue) for queue in seams.reply_queues(executor)]

    def queues_of_call(asked: Collection[int]) -> list[Reply]:
        for rank in asked:
            ranks[rank].due += 1
        call = [(ranks[rank], ranks[rank].due) for rank in asked]
        return [Reply(replies, replies.due, call) for replies in ranks]

    if ranks:
        seams.calls_observed(executor, queues_of_call)


class Replies:
    """One rank's queue.

    Attributes:
        queue: vLLM's.
        due: calls that the rank has been asked to answer.
        taken: replies that were taken off the queue.
    """

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.due = self.taken = 0

    def take(self, number: int, timeout: float | None, **how: Any) -> Any:
        """The reply to call `number`; those to earlier calls are dropped.

        Args:
            timeout: seconds in all.
            how: what the queue's ``dequeue`` takes besides.

        Raises:
            TimeoutError: it has not come.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self.taken += 1  # one that cannot be unpickled is off the queue too
            try:
                reply = self.queue.dequeue(timeout=None if end is None else max(0.0, end - time.monotonic()), **how)
            except TimeoutError:
                self.taken -= 1
                raise
            if self.taken >= number:
                return reply


class Reply:
    """One rank's reply to one call, in the place of the rank's queue."""

    def __init__(self, replies: Replies, number: int, call: list[tuple[Replies, int]]) -> None:
        self._replies, self._number, self._call = replies, number, call

    def dequeue(self, timeout: float | None = None, **how: Any) -> Any:
        """As the queue's. If it is a failure, the executor will not ask for the other ranks' replies."""
        reply = self._replies.take(self._number, timeout, **how)
        if seams.is_failure(reply):
            end = time.monotonic() + PATIENCE
            for replies, number in self._call:
                if replies.taken < number:
                    with suppress(Exception):  # the failure at hand is what the caller has to hear of
                        replies.take(number, end - time.monotonic(), **how)
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replies.queue, name)
