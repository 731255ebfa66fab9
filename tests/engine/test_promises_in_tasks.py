"""The package's promises where many tasks meet: clients, a trainer, keepers of adapters and pollers on one `AsyncLLM`.

The engine's core has a process of its own. The model (`Facts`) says at any time what may be so: from when a call begins
until it has returned, both what was and what will be. A request may get what was so at some time between its first
moment and its last, and nothing else; where that is one thing only, its tokens are exact.

Hundreds of cycles, for as long as one has time:

    make test PYTEST_ARGS="-m slow -k soak -s tests/engine/test_promises_in_tasks.py"
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.promises import BASES, ENGINE, NAMES, NOTHING, PROMPT, TOKENS, WEIGHTS, Dice, Versions, of_pool
from tests.support.scenario import Scenario, engine_args
from vllm_lora_reload import AdapterMissingError, LoRAReloadError, WeightsMissingError, update_adapter

pytestmark = pytest.mark.engine

STEPS = 200
SOAK_CYCLES = 300
CLIENTS, ASKS = 3, 5
POLLERS = 2
BOUND = 60.0  # seconds that a round may take, with all that it does, on a slow machine


@dataclass
class Request:
    """One that is under way, with all that was possible since its first moment."""

    bases: set[str]
    weights: set[int | None]  # None: there is no such adapter
    may_be_missing: bool
    may_be_aborted: bool


@dataclass
class Facts:
    """Attributes:
    bases: what base weights may be. Empty never; while they are missing, `missing` says so.
    missing: whether requests may be refused: from a sleep at level 2 until all is awake and loaded.
    falling: whether a sleep has begun, which ends requests that run.
    weights: what each adapter may have, by id; None: it is not there.
    live: requests under way, with the adapter's id.
    """

    bases: set[str] = field(default_factory=lambda: {"A"})
    missing: bool = False
    falling: bool = False
    weights: dict[int, set[int | None]] = field(default_factory=dict)
    live: list[tuple[Request, int | None]] = field(default_factory=list)

    def begin(self, number: int | None) -> Request:
        request = Request(set(self.bases), set(self.of(number)), self.missing, self.falling)
        self.live.append((request, number))
        return request

    def of(self, number: int | None) -> set[int | None]:
        return {0} if number is None else self.weights.get(number, {None})

    def end(self, request: Request) -> None:
        self.live = [(each, number) for each, number in self.live if each is not request]

    def spread(self) -> None:
        """What is possible now is so for every request under way."""
        for request, number in self.live:
            request.bases |= self.bases
            request.weights |= self.of(number)
            request.may_be_missing |= self.missing
            request.may_be_aborted |= self.falling

    @contextmanager
    def changing(self, number: int, weights: int | None) -> Iterator[None]:
        """Around a call that gives an adapter other weights, or takes it away."""
        self.weights[number] = self.of(number) | {weights}
        self.spread()
        yield
        self.weights[number] = {weights}


class Tasks:
    """One engine, its model, and what the tasks do."""

    def __init__(self, engine: Any, versions: Versions, dice: Dice) -> None:
        self.engine, self.versions, self.dice = engine, versions, dice
        self.facts = Facts()
        self.tokens: dict[tuple[str, int | None], tuple[int, ...]] = {}
        self.digests: dict[str, dict[str, str]] = {}
        self.requests: dict[str, Any] = {}  # the newest of each name; kept when the adapter is removed
        self.old: list[Any] = []
        self.numbers = iter(range(10, 1_000_000))
        self.ids = iter(range(1_000_000))
        self.cycles = self.exact = 0
        self.longest = 0.0
        self.busy = asyncio.Event()

    # --- What is right -------------------------------------------------------------------------------------------

    async def learn(self) -> None:
        """With one adapter at a time, and nothing else under way."""
        references = [await self.update(f"reference {i}", self.versions.tensors[1]) for i in (1, 2, 3)]
        nothing = await self.update(NOTHING, self.versions.nothing)  # in the last slot
        await self.engine.pin_lora(nothing.lora_int_id)
        for base in reversed(BASES):
            await self.load(base)
            await self.engine.reset_prefix_cache()
            self.digests[base] = await self.of_base()
            self.tokens[base, 0] = await self.answer(None)
            assert await self.answer(nothing) == self.tokens[base, 0]
            for weights in WEIGHTS:
                request = await self.update("reference 1", self.versions.tensors[weights])
                self.tokens[base, weights] = await self.answer(request)
        assert len(set(self.tokens.values())) == len(self.tokens)
        for request in references:
            await self.engine.remove_lora(request.lora_int_id)
        assert self.digests["A"] != self.digests["B"]

    async def of_base(self) -> dict[str, str]:
        return of_pool((await self.engine.collective_rpc("pool_digests"))[0], of_base=True)

    async def answer(self, request: Any) -> tuple[int, ...]:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        tokens: tuple[int, ...] = ()
        stream = self.engine.generate(PROMPT, greedy, request_id=f"r{next(self.ids)}", lora_request=request)
        async for output in stream:
            tokens = tuple(output.outputs[0].token_ids)
        return tokens

    async def ask(self, request: Any) -> None:
        """Judge one request by what was possible while it was under way."""
        start = time.monotonic()
        facts = self.facts.begin(request.lora_int_id if request else None)
        outcome: Any
        try:
            outcome = await self.answer(request)
        except LoRAReloadError as error:
            outcome = error
        finally:
            self.facts.end(facts)
        self.longest = max(self.longest, time.monotonic() - start)
        who = f"{request.lora_name if request else 'base'}: {outcome!r}, possible: {facts}"
        if isinstance(outcome, WeightsMissingError):
            assert facts.may_be_missing, who
            return
        if isinstance(outcome, AdapterMissingError):
            assert None in facts.weights, who
            return
        right = [self.tokens[base, weights] for base in facts.bases for weights in facts.weights - {None}]
        assert isinstance(outcome, tuple) and right, who
        if len(outcome) < TOKENS:
            assert facts.may_be_aborted or None in facts.weights, who
        if len(right) == 1:
            assert outcome == right[0][: len(outcome)], who
            self.exact += len(outcome) == TOKENS
        else:  # new weights take over between two tokens
            assert not outcome or outcome[0] in {tokens[0] for tokens in right}, who

    # --- Tasks -----------------------------------------------------------------------------------------------------

    async def client(self, dice: random.Random) -> None:
        for _ in range(ASKS):
            request = dice.choice([None, *self.requests.values(), *self.requests.values(), *self.old])
            self.dice.note(f"ask({request.lora_name}, {request.lora_int_id})" if request else "ask()")
            await self.ask(request)

    async def keeper(self, dice: random.Random, names: tuple[str, ...]) -> None:
        """Owns some adapters: only it changes them."""
        for _ in range(3):
            name, weights = dice.choice(names), dice.choice(WEIGHTS)
            known = self.requests.get(name)
            if known and dice.random() < 0.3:
                self.dice.note(f"remove_lora({name}, {known.lora_int_id})")
                with self.facts.changing(known.lora_int_id, None):
                    await self.engine.remove_lora(known.lora_int_id)
                # A request that somebody kept has vLLM read its files again.
                files = {each for each, folder in self.versions.folders.items() if str(folder) == known.lora_path}
                self.facts.weights[known.lora_int_id] |= files
                if dice.random() < 0.5:
                    await self.add(name, weights)
            elif known:
                self.dice.note(f"update_adapter({name}, weights {weights})")
                was_there = None not in self.facts.of(known.lora_int_id)
                with self.facts.changing(known.lora_int_id, weights):
                    self.requests[name] = updated = await self.update(name, self.versions.tensors[weights])
                if updated.lora_int_id != known.lora_int_id:
                    assert not was_there, "a name keeps its id"
                    self.facts.weights |= {known.lora_int_id: {None}, updated.lora_int_id: {weights}}
            else:
                self.dice.note(f"update_adapter(new {name}, weights {weights})")
                self.requests[name] = await self.update(name, self.versions.tensors[weights])
                self.facts.weights[self.requests[name].lora_int_id] = {weights}

    async def update(self, name: str, tensors: Any) -> Any:
        return (await update_adapter(self.engine, name, tensors, self.versions.config)).lora_request

    async def add(self, name: str, weights: int) -> None:
        """Under another id than the one that was removed; somebody may still ask for that."""
        from vllm.lora.request import LoRARequest

        number = next(self.numbers)
        self.dice.note(f"add_lora({name}, {number}, weights {weights})")
        request = LoRARequest(name, number, str(self.versions.folders[weights]))
        await self.engine.add_lora(request)
        self.facts.weights[number] = {weights}
        old, self.requests[name] = self.requests[name], request
        if old.lora_path.startswith("lora_reload:"):  # else vLLM would read it again
            self.old = [*self.old[-3:], old]

    async def poller(self) -> None:
        """As dashboards do, without a pause."""
        while self.busy.is_set():
            (status,) = await self.engine.collective_rpc("lora_reload_status")
            assert status["state"] in ("complete", "offloaded", "discarded", "missing")
            await self.engine.list_loras()

    async def trainer(self, dice: random.Random) -> None:
        """One step of a training: sleep, other weights, wake up."""
        level, base = dice.choice((1, 2, 2)), dice.choice(BASES)
        way, at_once = dice.choice(("reload_weights", "load_one_by_one")), dice.random() < 0.5
        await asyncio.sleep(dice.random() * 0.2)
        self.dice.note(f"sleep({level})")
        self.facts.falling, self.facts.missing = True, level == 2
        self.facts.spread()
        await self.engine.sleep(level=level)
        self.facts.falling = False
        await asyncio.sleep(dice.random() * 0.2)
        if level == 2:
            self.facts.bases = {*self.facts.bases, base}
            self.facts.spread()
            self.dice.note(f"wake_up({'' if at_once else 'weights'}), {way} {base}")
            await self.engine.wake_up(None if at_once else ["weights"])
            await self.load(base, way)
            self.facts.bases = {base}
        self.dice.note("wake_up()")
        await self.engine.wake_up()
        self.facts.missing = False
        self.cycles += 1

    async def load(self, base: str, way: str = "reload_weights") -> None:
        path = str(self.versions.checkpoints[base])
        args = {"kwargs": {"weights_path": path}} if way == "reload_weights" else {"args": (path,)}
        await self.engine.collective_rpc(way, **args)

    # --- Rounds ----------------------------------------------------------------------------------------------------

    async def round(self) -> None:
        """All tasks at once; then, when all is quiet, everything is exact."""
        dice = [random.Random(self.dice.random.random()) for _ in range(CLIENTS + 3)]
        self.busy.set()
        pollers = [asyncio.create_task(self.poller()) for _ in range(POLLERS)]
        work = [
            *(self.client(each) for each in dice[3:]),
            self.keeper(dice[0], NAMES[:2]),
            self.keeper(dice[1], NAMES[2:]),
            self.trainer(dice[2]),
        ]
        try:
            await asyncio.wait_for(asyncio.gather(*work), BOUND)
        finally:
            self.busy.clear()
        await asyncio.wait_for(asyncio.gather(*pollers), BOUND)
        for request in (None, *self.requests.values()):
            await asyncio.wait_for(self.ask(request), BOUND)
        (base,) = self.facts.bases
        assert await self.of_base() == self.digests[base]

    async def run(self, cycles: int) -> None:
        with self.dice.shown():
            await self.learn()
            while len(self.dice.taken) < self.dice.steps or self.cycles < cycles:
                await self.round()


async def in_engine(folder: Path, dice: Dice, cycles: int = 0) -> Tasks:
    """At least so many steps, and so many cycles of sleep."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    checkpoint = make_checkpoint(folder / "model")
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args(Scenario(engine=ENGINE), checkpoint)))
    try:
        tasks = Tasks(engine, Versions(folder, checkpoint), dice)
        await tasks.run(cycles)
        return tasks
    finally:
        engine.shutdown()


@pytest.fixture(autouse=True)
def core_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def test_all_at_once(tmp_path: Path) -> None:
    tasks = asyncio.run(in_engine(tmp_path, Dice(STEPS)))
    assert tasks.exact > tasks.dice.steps // 10 and tasks.cycles > tasks.dice.steps // 50


@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    """300 cycles; see the heading of this file."""
    asyncio.run(in_engine(tmp_path, Dice(0), SOAK_CYCLES))
