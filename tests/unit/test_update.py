"""The front end's side of an update, against workers that only take notes."""

import asyncio
from typing import Any

import pytest
import torch

from vllm_lora_reload import AdapterRefusedError, LoRAReloadError, seams, update_adapter
from vllm_lora_reload.client import Guard

TENSORS = {"x.lora_A.weight": torch.ones(1)}
CONFIG = {"r": 1}


class Workers:
    """An ``AsyncLLM`` whose calls take their time; `refusal` is what staging answers."""

    def __init__(self, refusal: str | None = None) -> None:
        self.lora_reload = Guard(warn_only=False)
        self.refusal = refusal
        self.known: dict[str, dict[str, int]] = {}
        self.staged: dict[str, tuple[str, int]] = {}
        self.engine_core = type("Core", (), {"add_request": None})()

    async def add_request(self) -> None: ...

    async def collective_rpc(self, method: str, kwargs: Any = None) -> list[Any]:
        await asyncio.sleep(0)
        if method == "lora_reload_adapters":
            return [dict(self.known)]
        if method == "list_loras":
            return [[each["lora_int_id"] for each in self.known.values()]]
        if method == "lora_reload_stage_adapter":
            self.staged[kwargs["token"]] = (kwargs["name"], kwargs["lora_int_id"])
            return [None, self.refusal]
        name, number = self.staged.pop(kwargs["token"])
        if method == "lora_reload_commit_adapter":
            version = self.known.get(name, {"version": 0})["version"] + 1
            self.known[name] = {"lora_int_id": number, "version": version}
            return [version, version]
        return [None, None]


@pytest.fixture(autouse=True)
def unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "requests_marked", lambda engine, mark: None)


def test_two_new_names_at_once_get_two_ids() -> None:
    workers = Workers()

    async def both() -> Any:
        return await asyncio.gather(*(update_adapter(workers, name, TENSORS, CONFIG) for name in ("a", "b", "a")))

    a, b, again = asyncio.run(both())
    assert a.lora_int_id == again.lora_int_id != b.lora_int_id
    assert sorted((a.version, again.version)) == [1, 2] and b.version == 1
    assert workers.staged == {}


def test_refusal_of_one_rank_discards_on_all() -> None:
    workers = Workers("ValueError: no room")
    with pytest.raises(AdapterRefusedError, match="adapter 'a' was not updated: rank 1: ValueError: no room"):
        asyncio.run(update_adapter(workers, "a", TENSORS, CONFIG))
    assert workers.known == {} and workers.staged == {}


@pytest.mark.parametrize("stops", [True, False])
def test_what_was_staged_is_dropped_if_the_call_fails(stops: bool) -> None:
    """On the worker that had staged it. In an engine that is not asynchronous too."""

    class Fails(Workers):
        async def collective_rpc(self, method: str, kwargs: Any = None) -> list[Any]:
            found = await super().collective_rpc(method, kwargs)
            if method == "lora_reload_stage_adapter":
                raise TimeoutError("a worker did not answer")
            return found

    class Sync(Fails):
        def collective_rpc(self, method: str, kwargs: Any = None) -> Any:  # type: ignore[override]
            return asyncio.run(super().collective_rpc(method, kwargs))

    workers = Fails() if stops else Sync()
    with pytest.raises(TimeoutError):
        result = update_adapter(workers, "a", TENSORS, CONFIG)
        asyncio.run(result)
    assert workers.staged == {} and workers.known == {}


def test_a_caller_that_does_not_wait_leaves_no_half_update() -> None:
    workers = Workers()

    async def main() -> None:
        task = asyncio.ensure_future(update_adapter(workers, "a", TENSORS, CONFIG))
        while not workers.staged:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while workers.lora_reload.updates:
            await asyncio.sleep(0)

    asyncio.run(main())
    number = workers.known["a"]["lora_int_id"]
    assert workers.staged == {} and workers.lora_reload.versions == {number: 1}


def test_an_id_that_another_front_end_gave_away_first() -> None:
    class Taken(Workers):
        async def collective_rpc(self, method: str, kwargs: Any = None) -> list[Any]:
            if method == "lora_reload_commit_adapter" and not self.known:
                self.known["b"] = {"lora_int_id": self.staged.pop(kwargs["token"])[1], "version": 1}
                return [0, 0]
            return await super().collective_rpc(method, kwargs)

    workers = Taken()
    with pytest.raises(AdapterRefusedError, match="under the same id; try again"):
        asyncio.run(update_adapter(workers, "a", TENSORS, CONFIG))
    number = workers.known["b"]["lora_int_id"]
    assert number not in workers.lora_reload.versions
    assert asyncio.run(update_adapter(workers, "a", TENSORS, CONFIG)).lora_int_id == number + 1


def test_engine_without_the_plugin() -> None:
    with pytest.raises(LoRAReloadError, match="VLLM_PLUGINS"):
        update_adapter(object(), "a", TENSORS, CONFIG)
