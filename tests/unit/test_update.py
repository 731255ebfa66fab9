"""The front end's side of an update, against workers that only take notes."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_lora_reload import AdapterRefusedError, LoRAReloadError, seams, staging, update_adapter
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
        self.seen: dict[str, torch.Tensor] = {}
        self.log: list[str] = []
        self.engine_core = type("Core", (), {"add_request": None})()

    async def add_request(self) -> None: ...

    async def collective_rpc(self, method: str, kwargs: Any = None) -> list[Any]:
        await asyncio.sleep(0)
        self.log.append(method)
        if method == "lora_reload_adapter":
            free = max([999_999, *(each["lora_int_id"] for each in self.known.values())]) + 1
            known = {"lora_int_id": None, "version": 0} | self.known.get(kwargs["name"], {}) | {"free": free}
            await asyncio.sleep(0)  # what was true may not be any more
            return [known, known]
        if method == "lora_reload_stage_adapter":
            self.staged[kwargs["token"]] = (kwargs["name"], kwargs["lora_int_id"])
            self.seen = load_file(Path(kwargs["folder"], "adapter_model.safetensors"))
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
        asyncio.run(update_adapter(workers, "a", TENSORS, CONFIG))
    assert workers.staged == {} and workers.known == {}


def test_a_caller_that_does_not_wait_leaves_no_half_update() -> None:
    workers = Workers()

    async def main() -> None:
        task = asyncio.ensure_future(update_adapter(workers, "a", TENSORS, CONFIG))
        while "lora_reload_stage_adapter" not in workers.log:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while workers.lora_reload.updates:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert workers.staged == {} and workers.known["a"]["version"] == 1
    assert workers.lora_reload.prefixes.salt(seams.lora_request("a", workers.known["a"]["lora_int_id"], "x"))


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
    assert not workers.lora_reload.prefixes.salt(seams.lora_request("b", number, "x"))
    assert asyncio.run(update_adapter(workers, "a", TENSORS, CONFIG)).lora_int_id == number + 1


def test_engine_without_the_plugin() -> None:
    with pytest.raises(LoRAReloadError, match="VLLM_PLUGINS"):
        update_adapter(object(), "a", TENSORS, CONFIG)


def test_requests_go_on_while_tensors_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as that takes: here until the event loop has done ten other things."""
    workers, beats, enough = Workers(), 0, threading.Event()
    write = staging.write

    def slow(*args: Any) -> Any:
        assert enough.wait(10), "the event loop stood still"
        return write(*args)

    monkeypatch.setattr(staging, "write", slow)

    async def main() -> None:
        nonlocal beats
        task = asyncio.ensure_future(update_adapter(workers, "a", TENSORS, CONFIG))
        while not task.done():
            beats += 1
            if beats == 10:
                enough.set()
            await asyncio.sleep(0.001)
        assert (await task).version == 1

    asyncio.run(main())
    assert beats >= 10


def test_a_caller_that_does_not_wait_for_the_copy_has_updated_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may change its tensors at once, and some of them were not copied yet."""
    workers, go_on, begun = Workers(), threading.Event(), threading.Event()
    write, folders = staging.write, []

    def slow(*args: Any) -> Any:
        begun.set()
        go_on.wait(10)
        folders.append(write(*args))
        return folders[0]

    monkeypatch.setattr(staging, "write", slow)

    async def main() -> None:
        task = asyncio.ensure_future(update_adapter(workers, "a", {"x.lora_A.weight": torch.ones(1)}, CONFIG))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        while not folders or Path(folders[0].name).exists():
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert workers.log == [] and not workers.lora_reload.updates


def test_what_is_staged_is_what_the_tensors_were_when_the_caller_waited() -> None:
    workers, given = Workers(), {"x.lora_A.weight": torch.ones(1)}

    async def main() -> None:
        await update_adapter(workers, "a", given, CONFIG)
        given["x.lora_A.weight"].zero_()

    asyncio.run(main())
    assert workers.seen["x.lora_A.weight"] == 1


def test_an_id_is_not_given_twice_though_the_workers_answer_late() -> None:
    """Both names are asked about before either is there; one is added, and done with, before the other chooses."""

    class Late(Workers):
        async def collective_rpc(self, method: str, kwargs: Any = None) -> list[Any]:
            answer = await super().collective_rpc(method, kwargs)
            if method == "lora_reload_adapter" and kwargs["name"] == "late":
                asked.set()
                await go_on.wait()
            return answer

    async def main() -> None:
        nonlocal asked, go_on
        asked, go_on = asyncio.Event(), asyncio.Event()
        late = asyncio.ensure_future(update_adapter(workers, "late", TENSORS, CONFIG))
        await asked.wait()
        early = await update_adapter(workers, "early", TENSORS, CONFIG)
        go_on.set()
        assert (await late).lora_int_id != early.lora_int_id

    workers, asked, go_on = Late(), None, None
    asyncio.run(main())


@pytest.mark.parametrize("alone", [True, False])
def test_a_commit_that_fails_names_rank_and_cause(alone: bool) -> None:
    class Fails(Workers):
        async def collective_rpc(self, method: str, kwargs: Any = None) -> list[Any]:
            if method == "lora_reload_commit_adapter":
                return [1 if alone else staging.FOLLOWS, "OutOfMemoryError: 2 GiB"]
            return await super().collective_rpc(method, kwargs)

    with pytest.raises(AdapterRefusedError, match=r"'a' was not updated: rank 1: OutOfMemoryError: 2 GiB$"):
        asyncio.run(update_adapter(Fails(), "a", TENSORS, CONFIG))


def test_a_name_for_each_of_many_steps_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(method: str, kwargs: Any = None) -> list[Any]:
        known = {"lora_int_id": None, "version": 0, "free": 1_000_000}
        return [{"lora_reload_adapter": known, "lora_reload_commit_adapter": 1}.get(method)]

    workers = Workers()
    monkeypatch.setattr(workers, "collective_rpc", answer)
    guard = workers.lora_reload
    seen = set()
    for step in range(6_000):
        done = update_adapter(workers, f"step {step}", path="/somewhere")
        seen.add(done.lora_int_id)
        guard.prefixes.removed(done.lora_int_id)
    assert len(seen) == 6_000 and guard.reserved == {} and len(guard.prefixes._names) <= 4096


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (("", TENSORS, CONFIG), TypeError, "name is a string that is not empty, not ''"),
        ((None, TENSORS, CONFIG), TypeError, "name is a string that is not empty, not None"),
        (("a", [torch.ones(1)], CONFIG), TypeError, "tensors is a mapping of names to torch tensors, not a list"),
        (("a", "adapter.safetensors", CONFIG), TypeError, "tensors is a mapping .* not a str"),
        (("a", TENSORS, "r=8"), TypeError, r"peft_config is a peft.LoraConfig or its dict, not a str"),
        (("a", {}, CONFIG), AdapterRefusedError, "no tensors were given"),
        (("a", {"x": [1.0]}, CONFIG), AdapterRefusedError, "x is a list; a torch tensor is needed"),
        (("a", {"x": torch.ones(1).numpy()}, CONFIG), AdapterRefusedError, "x is a ndarray; a torch tensor is needed"),
        (("a", {"x": torch.ones(1, device="meta")}, CONFIG), AdapterRefusedError, "x is on the meta device"),
        (("a", {"x": torch.ones(1, dtype=torch.int8)}, CONFIG), AdapterRefusedError, r"x has torch.int8; float16"),
        (("a", {"x": torch.ones(1, dtype=torch.bool)}, CONFIG), AdapterRefusedError, r"x has torch.bool; float16"),
        (("a", {"x": torch.ones(1) * 1j}, CONFIG), AdapterRefusedError, r"x has torch.complex64; float16"),
        (("a", {"x": torch.ones(1).to_sparse()}, CONFIG), AdapterRefusedError, r"x has torch.sparse_coo"),
    ],
)
def test_arguments_of_the_wrong_kind(args: Any, error: type[Exception], message: str) -> None:
    workers = Workers()
    with pytest.raises(error, match=message):
        asyncio.run(update_adapter(workers, *args))
    assert workers.log == []
