"""Requests that come at the wrong moment, with the timing forced: the engine core in a process of its own.

Each is answered right, or refused with the reason, alone; the engine lives on.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.checkpoints import make_adapter, make_checkpoint
from tests.support.scenario import PROMPTS, Scenario, engine_args
from vllm_lora_reload import AdapterMissingError, WeightsMissingError, update_adapter

pytestmark = pytest.mark.engine

CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


class Engine:
    """An `AsyncLLM` with prefix caching and one adapter, in an event loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = make_checkpoint(folder / "model")
        # Not of the logits: on the CPU, vLLM's kernel adds the last slot's to requests without adapter.
        self.adapter = make_adapter(
            folder / "adapter", self.checkpoint, target_modules=["q_proj", "o_proj", "down_proj"]
        )
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        args = engine_args(Scenario(), self.checkpoint) | {"enable_prefix_caching": True}
        self.llm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
        self._numbers = iter(range(1_000_000))
        self.base = await self.ask()
        self.adapted = await self.ask(self.request())
        assert self.base != self.adapted

    def request(self, name: str = "adapter", number: int = 1, path: Path | str | None = None) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, number, str(path or self.adapter))

    async def ask(self, lora: Any = None, tokens: int = 8, began: asyncio.Event | None = None, n: int = 1) -> list[int]:
        """Greedy tokens; `began` is set when the first is there."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=float(n > 1), max_tokens=tokens, ignore_eos=True, n=n)
        answer: list[int] = []
        stream = self.llm.generate(PROMPTS[0], greedy, request_id=str(next(self._numbers)), lora_request=lora)
        async for output in stream:
            answer = list(output.outputs[0].token_ids)
            if began is not None:
                began.set()
        return answer

    async def lose_weights(self) -> None:
        await self.llm.sleep(level=2)
        await self.llm.wake_up()

    async def reload(self) -> None:
        await self.llm.collective_rpc("reload_weights")

    @asynccontextmanager
    async def held_back(self) -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
        """Requests stop when the front end has done all it does with them: sets the first event, waits for the second.

        As slow preprocessing does, but certain.
        """
        core = self.llm.engine_core
        send, arrived, go = core.add_request_async, asyncio.Event(), asyncio.Event()

        async def add_request_async(*args: Any, **kwargs: Any) -> None:
            arrived.set()
            await go.wait()
            await send(*args, **kwargs)

        core.add_request_async = add_request_async
        try:
            yield arrived, go
        finally:
            core.add_request_async = send

    async def whole(self) -> None:
        """Both answer as at first, also by what the prefix cache holds."""
        assert await self.ask() == self.base
        assert await self.ask(self.request()) == self.adapted


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        engine = Engine(tmp_path_factory.mktemp("door"))
        try:
            yield engine
        finally:
            engine.llm.shutdown()
            tasks = asyncio.all_tasks(engine.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                engine.loop.run_until_complete(asyncio.wait(tasks))
            engine.loop.close()


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def run(engine: Engine) -> Run:
    """Runs a test in the engine's loop, at most a minute, and looks whether the engine is whole then."""

    async def within(test: Coroutine[Any, Any, None]) -> None:
        await asyncio.wait_for(test, 60)
        await asyncio.wait_for(engine.whole(), 60)

    return lambda test: engine.loop.run_until_complete(within(test))


@pytest.mark.parametrize("adapter", [False, True])
def test_a_request_that_was_prepared_before_the_sleep(engine: Engine, run: Run, adapter: bool) -> None:
    async def test() -> None:
        lora = engine.request() if adapter else None
        async with engine.held_back() as (arrived, go):
            late = asyncio.create_task(engine.ask(lora))
            await arrived.wait()
            await engine.lose_weights()
            go.set()
            with pytest.raises(WeightsMissingError, match=r"rank 0: base weights are missing: sleep\(level=2\)"):
                await late
        await engine.reload()

    run(test())


def test_a_request_that_is_in_the_engine_when_weights_go(engine: Engine, run: Run) -> None:
    """It waits behind a pause, the weights go where vLLM does not look, and the pause ends."""

    async def test() -> None:
        await engine.llm.sleep(level=1)
        waiting = asyncio.create_task(engine.ask())
        await asyncio.sleep(0)
        for call, args in (("wake_up", ()), ("sleep", (2,)), ("wake_up", ())):
            await engine.llm.collective_rpc(call, args=args)
        await engine.llm.wake_up()
        with pytest.raises(WeightsMissingError, match="base weights are missing"):
            await waiting
        await engine.reload()

    run(test())


def test_all_samples_of_a_prompt_are_refused_together(engine: Engine, run: Run) -> None:
    async def test() -> None:
        await engine.lose_weights()
        with pytest.raises(WeightsMissingError):
            await engine.ask(n=3)
        await engine.reload()
        assert not engine.llm.output_processor.request_states
        assert not engine.llm.output_processor.parent_requests

    run(test())


@pytest.mark.parametrize("adapter", [False, True])
def test_requests_wait_over_level_1(engine: Engine, run: Run, adapter: bool) -> None:
    async def test() -> None:
        await engine.llm.sleep(level=1)
        early = asyncio.create_task(engine.ask(engine.request() if adapter else None))
        await engine.llm.collective_rpc("lora_reload_status")
        await engine.llm.wake_up(["weights"])
        later = asyncio.create_task(engine.ask())
        await engine.llm.collective_rpc("lora_reload_status")
        assert not early.done() and not later.done()
        await engine.llm.wake_up(["kv_cache"])
        assert await early == (engine.adapted if adapter else engine.base)
        assert await later == engine.base

    run(test())


def test_level_2_with_mode_keep(engine: Engine, run: Run) -> None:
    """Refused only if a request would be kept."""

    async def test() -> None:
        began = asyncio.Event()
        running = asyncio.create_task(engine.ask(tokens=200, began=began))
        await began.wait()
        with pytest.raises(ValueError, match=r"kept over sleep\(level=2\)"):
            await engine.llm.sleep(level=2, mode="keep")
        assert len(await running) == 200
        await engine.llm.sleep(level=2, mode="keep")
        await engine.llm.wake_up()
        await engine.reload()

    run(test())


def test_weights_without_kv_cache(engine: Engine, run: Run) -> None:
    async def test() -> None:
        await engine.llm.sleep(level=2)
        await engine.llm.wake_up(["weihgts"])
        with pytest.raises(WeightsMissingError, match=r"sleeps at level 2\. Call wake_up\(\[\"weights\"\]\)"):
            await engine.ask()
        await engine.llm.wake_up(["weights"])
        await engine.reload()
        for tags in (["kv_cahce"], ["weights"]):
            await engine.llm.wake_up(tags)
            with pytest.raises(WeightsMissingError, match=r"KV cache sleeps\. Call wake_up\(\[\"kv_cache\"\]\)"):
                await engine.ask()
        await engine.llm.wake_up(["kv_cache"])

    run(test())


async def policy(engine: Engine) -> Any:
    """An adapter that only this package has; it answers as the one with files."""
    tensors = load_file(engine.adapter / "adapter_model.safetensors")
    return (await update_adapter(engine.llm, "policy", tensors, CONFIG)).lora_request


def test_a_straggler_of_a_removed_adapter(engine: Engine, run: Run) -> None:
    async def test() -> None:
        lora = await policy(engine)
        async with engine.held_back() as (arrived, go):
            late = asyncio.create_task(engine.ask(lora))
            await arrived.wait()
            await engine.llm.remove_lora(lora.lora_int_id)
            go.set()
            with pytest.raises(AdapterMissingError, match="adapter 'policy' is not there"):
                await late
        assert await engine.ask(await policy(engine)) == engine.adapted
        await engine.llm.remove_lora(lora.lora_int_id)

    run(test())


def test_an_adapter_is_removed_while_its_request_runs(engine: Engine, run: Run) -> None:
    """That request goes on with it, as with one that has files; no other is let in, and then the adapter is gone."""

    async def test() -> None:
        lora = await policy(engine)
        expected = await engine.ask(lora, tokens=200)
        began = asyncio.Event()
        running = asyncio.create_task(engine.ask(lora, tokens=200, began=began))
        await began.wait()
        await engine.llm.remove_lora(lora.lora_int_id)
        with pytest.raises(AdapterMissingError):
            await engine.ask(lora)
        assert await running == expected
        assert await engine.ask(engine.request()) == engine.adapted
        with pytest.raises(AdapterMissingError):
            await engine.ask(lora)
        assert lora.lora_int_id not in await engine.llm.list_loras()

    run(test())


def test_files_are_gone_when_an_adapter_was_evicted(engine: Engine, run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        shutil.copytree(engine.adapter, tmp_path / "policy")
        lora = (await update_adapter(engine.llm, "policy", path=tmp_path / "policy")).lora_request
        assert await engine.ask(lora) == engine.adapted
        shutil.rmtree(tmp_path / "policy")
        for number in range(11, 15):  # more than host memory is to hold
            assert await engine.ask(engine.request(f"other{number}", number)) == engine.adapted
        with pytest.raises(AdapterMissingError, match="adapter 'policy' is not there: rank 0: "):
            await engine.ask(lora)

    run(test())


def damaged(folder: Path, adapter: Path, damage: str) -> Path:
    if damage == "absent":
        return folder / "nothing"
    shutil.copytree(adapter, folder / "bad")
    if damage == "cut off":
        file = folder / "bad" / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file = folder / "bad" / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 64}))
    return folder / "bad"


@pytest.mark.parametrize("damage", ["absent", "cut off", "rank"])
def test_an_adapter_that_cannot_be_read(engine: Engine, run: Run, tmp_path: Path, damage: str) -> None:
    """vLLM alone reads it in the step, and ends."""

    async def test() -> None:
        bad = engine.request("bad", 99, damaged(tmp_path, engine.adapter, damage))
        good = asyncio.create_task(engine.ask())
        with pytest.raises(AdapterMissingError, match="adapter 'bad' is not there"):
            await engine.ask(bad)
        assert await good == engine.base

    run(test())


def test_load_inplace_with_a_request(engine: Engine, run: Run, tmp_path: Path) -> None:
    """Files are read when they have changed, not at every step, and not over an update."""

    async def test() -> None:
        shutil.copytree(engine.adapter, tmp_path / "live")
        lora = engine.request("live", 50, tmp_path / "live")
        lora.load_inplace = True
        assert await engine.ask(lora) == engine.adapted
        nothing = {name: tensor * 0 for name, tensor in load_file(engine.adapter / "adapter_model.safetensors").items()}
        await update_adapter(engine.llm, "live", nothing, CONFIG)
        assert await engine.ask(lora) == engine.base
        shutil.rmtree(tmp_path / "live")
        assert await engine.ask(lora) == engine.base
        await engine.llm.remove_lora(50)

    run(test())


def test_control_calls_do_not_starve_requests(engine: Engine, run: Run) -> None:
    async def test() -> None:
        done = False

        async def poll() -> None:
            while not done:
                await engine.llm.collective_rpc("lora_reload_status")

        async def update() -> None:
            while not done:
                await policy(engine)

        busy = [asyncio.create_task(each()) for each in (poll, poll, update)]
        lora = await policy(engine)
        # Not both kinds in one batch: on the CPU, vLLM answers those without adapter as those with one.
        base = await asyncio.gather(*(engine.ask() for _ in range(25)))
        adapted = await asyncio.gather(*(engine.ask(lora) for _ in range(25)))
        done = True
        await asyncio.gather(*busy)
        assert base == [engine.base] * 25 and adapted == [engine.adapted] * 25
        await engine.llm.remove_lora(lora.lora_int_id)

    run(test())
