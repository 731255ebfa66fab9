"""Adapters over sleep and reload, updates in place, and requests for what is not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import PEFT_CONFIG, make_adapter
from tests.support.engine import Engine
from tests.support.scenario import PROMPTS
from vllm_lora_reload import (
    AdapterMissingError,
    AdapterRefusedError,
    AsleepError,
    WeightsMissingError,
    staging,
    update_adapter,
)
from vllm_lora_reload.diagnosis import adapter_rank
from vllm_lora_reload.settings import Settings

pytestmark = pytest.mark.engine
SLOTS = 6


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Slots for two adapters of its own and four more, and host memory for two beyond that."""
    return Engine(tmp_path_factory.mktemp("roomy"), max_loras=SLOTS, max_cpu_loras=SLOTS + 2)


@pytest.fixture
def engine(roomy: Engine) -> Iterator[Engine]:
    """The same one each time, with nothing but its own two adapters."""
    state = roomy.worker.lora_reload
    yield roomy
    state.settings = Settings()
    unpin(roomy)
    roomy.llm.wake_up()
    roomy.reload()
    for number in {*roomy.llm.llm_engine.list_loras(), *state.adapters._without_files}:
        roomy.llm.llm_engine.remove_lora(number)
    roomy.runner.reset_lora_state()  # vLLM's CPU kernel adds the last slot to requests without adapter
    assert roomy.ask() == roomy.before


def unpin(engine: Engine) -> None:
    manager = engine.worker.lora_reload.adapters.manager
    for cache in (manager._active_adapters, manager._registered_adapters):
        for number in list(cache.pinned_items):
            cache._unpin(number)


def tensors(engine: Engine, number: int) -> dict[str, torch.Tensor]:
    return load_file(engine.folder / f"adapter{number}" / "adapter_model.safetensors")


def answers(engine: Engine, request: Any) -> list[list[int]]:
    engine.requests["other"] = request
    try:
        return engine.ask("other")["other"]
    finally:
        del engine.requests["other"]


def update(engine: Engine, number: int, name: str = "policy", **changes: Any) -> Any:
    """Give `name` the weights of the engine's own adapter `number`, which are known to answer differently."""
    return update_adapter(engine.llm, name, tensors(engine, number) | changes, PEFT_CONFIG)


def sleep_and_wake(engine: Engine, level: int) -> None:
    engine.llm.sleep(level=level)
    engine.llm.wake_up()
    if level == 2:
        engine.reload()


# --- Updates ------------------------------------------------------------------------------------------------------


def test_update_adds_then_replaces_under_one_id(engine: Engine) -> None:
    first = update(engine, 2)
    assert answers(engine, first.lora_request) == engine.before["adapter 2"]
    second = update(engine, 1)
    assert answers(engine, second.lora_request) == engine.before["adapter 1"]
    assert second.version == first.version + 1 and first.lora_int_id == second.lora_int_id
    known = engine.llm.collective_rpc("lora_reload_adapters")[0]["policy"]
    assert known == {"lora_int_id": first.lora_int_id, "version": second.version}
    assert engine.ask() == engine.before, "the others stay"


def test_update_of_an_adapter_that_came_from_files(engine: Engine) -> None:
    """It keeps its id; other front ends and requests need not change."""
    done = update(engine, 2, name="adapter1")
    assert done.lora_int_id == 1
    assert engine.ask("adapter 1")["adapter 1"] == engine.before["adapter 2"]
    back = update_adapter(engine.llm, "adapter1", path=engine.folder / "adapter1")
    assert back.version == done.version + 1
    assert engine.ask() == engine.before


@pytest.mark.parametrize("form", ["peft model's names", "other dtype", "config object"])
def test_what_trainers_have(engine: Engine, form: str) -> None:
    import peft

    given, config = tensors(engine, 2), PEFT_CONFIG
    if form == "peft model's names":
        given = {
            name.replace(".weight", ".default.weight") if "lora_embedding" not in name else f"{name}.default": tensor
            for name, tensor in given.items()
        }
    elif form == "other dtype":
        given = {name: tensor.double() for name, tensor in given.items()}
    else:
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules={"q_proj", "v_proj"})  # type: ignore[assignment]
    assert (
        answers(engine, update_adapter(engine.llm, "policy", given, config).lora_request)
        == (engine.before["adapter 2"])
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 4}, r"has tensors of rank 8, and adapter_config\.json says 4"),
        ({"r": 16}, r"has tensors of rank 8, and adapter_config\.json says 16"),
        ({"r": float("nan")}, "r is nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": 1e38}, "scaled by 1.25e\\+37 has values that are not finite"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'|does not support init_lora_weights='pissa'"),
        ({"peft_type": "ADALORA"}, "peft_type is 'ADALORA'"),
        ({"a_setting_of_the_future": 1}, "a_setting_of_the_future is 1"),
    ],
)
@pytest.mark.parametrize("way", ["tensors", "folder", "changed files"])
def test_config_that_does_not_fit_is_refused(
    engine: Engine, change: dict[str, Any], message: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is given with ``~``."""
    old, given = update(engine, 1), tensors(engine, 2)
    if "1.25e" in message:
        given = {name: tensor * 1e4 for name, tensor in given.items()}
    folder = engine.folder / "unfit"
    try:
        with staging.write(given, PEFT_CONFIG | change) as written:
            shutil.copytree(written, folder)
        monkeypatch.setenv("HOME", str(engine.folder))
        if way == "changed files":
            shutil.copytree(engine.folder / "adapter1", engine.folder / "lasting")
            old = update_adapter(engine.llm, "policy", path=engine.folder / "lasting")
            shutil.rmtree(engine.folder / "lasting")
            folder = folder.rename(engine.folder / "lasting")
            sleep_and_wake(engine, 1)
            with pytest.raises(AdapterMissingError, match=f"its files have changed, and .*({message})"):
                answers(engine, old.lora_request)
            update(engine, 1)
        else:
            with pytest.raises(AdapterRefusedError, match=message):
                if way == "tensors":
                    update_adapter(engine.llm, "policy", given, PEFT_CONFIG | change)
                else:
                    update_adapter(engine.llm, "policy", path="~/unfit")
        assert answers(engine, old.lora_request) == engine.before["adapter 1"]
    finally:
        shutil.rmtree(folder)


def test_commit_that_fails_half_way_keeps_the_old_weights(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    old = update(engine, 1)
    manager = engine.worker.lora_reload.adapters.manager
    module = list(manager.modules.values())[-1]
    write, left = module.set_lora, [0]

    def fails(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("2 GiB")

    monkeypatch.setattr(module, "set_lora", fails)
    for name in ("policy", "fresh"):
        left[0] = 2  # the first time all writes are held back
        with pytest.raises(AdapterRefusedError, match=f"'{name}' was not updated: rank 0: OutOfMemoryError: 2 GiB"):
            update(engine, 2, name=name)
        assert left[0] <= 0
        assert answers(engine, old.lora_request) == engine.before["adapter 1"]
    known = engine.llm.collective_rpc("lora_reload_adapters")[0]
    assert known["policy"]["version"] == old.version and "fresh" not in known
    assert engine.ask() == engine.before
    assert answers(engine, update(engine, 2).lora_request) == engine.before["adapter 2"]


# --- Adapters that go ---------------------------------------------------------------------------------------------


def test_request_for_a_removed_adapter_without_files(engine: Engine) -> None:
    """vLLM would look for its files in the midst of a step, and the engine would die."""
    straggler = update(engine, 2).lora_request
    engine.llm.llm_engine.remove_lora(straggler.lora_int_id)
    for _ in range(2):
        with pytest.raises(
            AdapterMissingError, match=r"'policy' is not there: rank 0: .*it came as tensors and was removed"
        ):
            answers(engine, straggler)
        assert engine.ask() == engine.before
    again = update(engine, 1).lora_request
    assert again.lora_int_id != straggler.lora_int_id
    assert answers(engine, again) == engine.before["adapter 1"]
    with pytest.raises(AdapterMissingError):
        answers(engine, straggler)


@pytest.mark.parametrize("how", ["tensors", "folder that is gone"])
def test_adapter_is_removed_while_its_request_runs(engine: Engine, how: str) -> None:
    from vllm import SamplingParams

    folder = engine.folder / "running"
    if how == "tensors":
        request = update(engine, 2).lora_request
    else:
        shutil.copytree(engine.folder / "adapter2", folder)
        request = update_adapter(engine.llm, "policy", path=folder).lora_request
    llm = engine.llm.llm_engine
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        llm.add_request(str(number), prompt, greedy, lora_request=request)
    llm.step()
    shutil.rmtree(folder, ignore_errors=True)
    llm.remove_lora(request.lora_int_id)
    done = {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: list(output.outputs[0].token_ids) for output in llm.step() if output.finished}
    assert [done[str(number)] for number in range(len(PROMPTS))] == engine.before["adapter 2"]
    assert engine.ask() == engine.before


def test_folder_is_gone_after_an_eviction(engine: Engine) -> None:
    folder = engine.folder / "short-lived"
    shutil.copytree(engine.folder / "adapter2", folder)
    request = update_adapter(engine.llm, "policy", path=folder).lora_request
    assert answers(engine, request) == engine.before["adapter 2"]
    shutil.rmtree(folder)
    assert answers(engine, request) == engine.before["adapter 2"], "vLLM has it in host memory"
    for number in range(SLOTS + 2):
        update(engine, 1, name=f"other {number}")
    with pytest.raises(AdapterMissingError, match=r"'policy' is not there: rank 0: .*short-lived"):
        answers(engine, request)
    for name in ("adapter 1", "adapter 2"):  # not the base: vLLM's CPU kernel adds the last slot to it
        assert engine.ask(name)[name] == engine.before[name]


def test_load_inplace_with_requests_alone(engine: Engine) -> None:
    """Without an ``add_lora``: the files are read once, not over an update, and may go."""
    from vllm.lora.request import LoRARequest

    folder = engine.folder / "inplace"
    shutil.copytree(engine.folder / "adapter2", folder)
    request = LoRARequest("policy", 77, str(folder), load_inplace=True)
    reads: list[str] = []
    adapters = engine.worker.lora_reload.adapters
    read = adapters._read
    adapters._read = lambda request, load: reads.append(request.lora_path) or read(request, load)
    try:
        assert answers(engine, request) == answers(engine, request) == engine.before["adapter 2"]
        assert reads == [str(folder)]
        update(engine, 1)
        assert answers(engine, request) == engine.before["adapter 1"]
        shutil.rmtree(folder)
        assert answers(engine, request) == engine.before["adapter 1"]
        assert reads.count(str(folder)) == 1
    finally:
        del adapters._read
        shutil.rmtree(folder, ignore_errors=True)


Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
DOWN = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q.format("A"): torch.zeros(8, 64)}, r"qkv_proj: weights of shape \[8, 64\] do not fit"),
        ({Q.format("A"): torch.zeros(8, 256)}, r"qkv_proj"),
        ({DOWN.format("B"): torch.zeros(64, 8)}, r"down_proj: weights of shape \[64, 8\] do not fit"),
        ({Q.format("A"): torch.zeros(4, 128)}, r"q_proj: lora_A has rank 4, lora_B has rank 8"),
        ({DOWN.format("B"): torch.full((128, 8), float("nan"))}, r"down_proj: lora_B has values that are not finite"),
        ({DOWN.format("A"): torch.full((8, 256), float("inf"))}, r"down_proj: lora_A has values that are not finite"),
        ({Q.format("A").replace("q_proj", "x_proj"): torch.zeros(8, 128)}, r"x_proj"),
    ],
)
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_refused_update_changes_nothing(
    engine: Engine, changes: dict[str, torch.Tensor], message: str, asleep: bool
) -> None:
    old = update(engine, 1)
    if asleep:
        engine.llm.sleep(level=2)
    with pytest.raises(AdapterRefusedError, match=message):
        update(engine, 2, **changes)
    if asleep:
        engine.llm.wake_up()
        engine.reload()
    assert answers(engine, old.lora_request) == engine.before["adapter 1"]
    assert engine.llm.collective_rpc("lora_reload_adapters")[0]["policy"]["version"] == old.version
    assert engine.worker.lora_reload.adapters._staged == {}


@pytest.mark.parametrize("inside", ["_orig_mod.", "module."])
def test_names_of_a_wrapped_model_are_refused(engine: Engine, inside: str) -> None:
    """Of a compiled or a distributed one. vLLM finds no module of such a name, and answers with the base model."""
    given = {n.replace("base_model.model.", f"base_model.model.{inside}"): t for n, t in tensors(engine, 2).items()}
    with pytest.raises(AdapterRefusedError, match=f"the model has no place for {inside}lm_head, .* and 13 more"):
        update_adapter(engine.llm, "policy", given, PEFT_CONFIG)


def test_half_of_a_pair_is_refused(engine: Engine) -> None:
    given = tensors(engine, 2)
    del given[DOWN.format("B")]
    with pytest.raises(AdapterRefusedError, match=r"down_proj has lora_A but no lora_B"):
        update_adapter(engine.llm, "policy", given, PEFT_CONFIG)
    assert "policy" not in engine.llm.collective_rpc("lora_reload_adapters")[0]


def test_refused_rank_says_what_to_set(engine: Engine) -> None:
    path = make_adapter(engine.folder / "high", engine.checkpoint, rank=20)
    try:
        with pytest.raises(AdapterRefusedError, match=r"start the engine with max_lora_rank=32"):
            update_adapter(engine.llm, "policy", path=path)
        from vllm.lora.request import LoRARequest

        with pytest.raises(Exception, match=r"start the engine with max_lora_rank=32"):
            engine.llm.llm_engine.add_lora(LoRARequest("high", 9, str(path)))
        assert adapter_rank(str(path)) == 20
    finally:
        shutil.rmtree(path)


def test_one_rank_that_refuses_keeps_the_others_from_committing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = update(engine, 1)
    rpc = engine.llm.llm_engine.collective_rpc
    calls: list[str] = []

    def two_ranks(method: str, *args: Any, **kwargs: Any) -> list[Any]:
        calls.append(method)
        answer = rpc(method, *args, **kwargs)[0]
        return [answer, "ValueError: no room" if method == "lora_reload_stage_adapter" else answer]

    monkeypatch.setattr(engine.llm.llm_engine, "collective_rpc", two_ranks)
    with pytest.raises(AdapterRefusedError, match="rank 1: ValueError: no room"):
        update(engine, 2)
    assert "lora_reload_commit_adapter" not in calls and calls[-1] == "lora_reload_discard_adapter"
    monkeypatch.undo()
    assert answers(engine, old.lora_request) == engine.before["adapter 1"]


def test_workers_that_do_not_see_the_folder_get_its_files(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_lora_reload import staging

    seen: list[bool] = []
    real = staging.folder

    def elsewhere(path: str, files: Any) -> Any:
        seen.append(files is not None)
        return real("/no/such/folder", files)

    monkeypatch.setattr(staging, "folder", elsewhere)
    assert answers(engine, update(engine, 2).lora_request) == engine.before["adapter 2"]
    assert seen == [False, True]


def test_nothing_is_left_in_shared_memory(engine: Engine) -> None:
    before = set(os.listdir("/dev/shm"))
    update(engine, 2)
    with pytest.raises(AdapterRefusedError):
        update(engine, 2, **{DOWN.format("B"): torch.zeros(3, 8)})
    assert set(os.listdir("/dev/shm")) <= before


def test_all_slots_pinned(engine: Engine) -> None:
    """The update is kept and reaches a slot when there is one."""
    for number in range(SLOTS - 2):
        update(engine, 2, name=f"policy {number}")
    for number in engine.llm.llm_engine.list_loras():
        engine.llm.llm_engine.pin_lora(number)
    other = update(engine, 1, name="other")
    assert other.lora_int_id not in engine.worker.lora_reload.adapters.manager.lora_index_to_id
    assert engine.ask("adapter 1", "adapter 2") == {name: engine.before[name] for name in ("adapter 1", "adapter 2")}
    unpin(engine)
    assert answers(engine, other.lora_request) == engine.before["adapter 1"]


def test_tensors_that_share_memory(engine: Engine) -> None:
    given = tensors(engine, 2)
    whole = torch.cat([tensor.flatten() for tensor in given.values()])
    views, start = {}, 0
    for name, tensor in given.items():
        views[name] = whole[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    done = update_adapter(engine.llm, "policy", views, PEFT_CONFIG)
    assert answers(engine, done.lora_request) == engine.before["adapter 2"]


def test_an_id_that_went_to_another_name(engine: Engine) -> None:
    from vllm.lora.request import LoRARequest

    add, remove = engine.llm.llm_engine.add_lora, engine.llm.llm_engine.remove_lora
    add(LoRARequest("old", 7, str(engine.folder / "adapter1")))
    remove(7)
    new = LoRARequest("new", 7, str(engine.folder / "adapter2"))
    add(new)
    assert update(engine, 1, name="old").lora_int_id != 7
    assert answers(engine, new) == engine.before["adapter 2"]


def test_tensors_evicted_from_host_memory_come_back(engine: Engine) -> None:
    """vLLM's registry holds few adapters, and these have no files to be read again from."""
    done = [update(engine, 1 + number % 2, name=f"policy {number}") for number in range(SLOTS + 4)]
    assert len(engine.llm.llm_engine.list_loras()) == SLOTS + 2
    for number, each in enumerate(done):
        assert answers(engine, each.lora_request) == engine.before[f"adapter {1 + number % 2}"]


def test_update_needs_something_to_update(engine: Engine) -> None:
    with pytest.raises(TypeError, match="tensors and peft_config, or path"):
        update_adapter(engine.llm, "policy")
    with pytest.raises(TypeError, match="tensors and peft_config, or path"):
        update_adapter(engine.llm, "policy", tensors(engine, 1), PEFT_CONFIG, path="x")


# --- While asleep -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_update_while_asleep_applies_on_wake_up(engine: Engine, level: int) -> None:
    old = update(engine, 1)
    engine.llm.sleep(level=level)
    new = update(engine, 2)
    fresh = update(engine, 1, name="fresh")
    slept = engine.worker.pool_digests()
    engine.llm.wake_up()
    if level == 2:
        engine.reload()
    assert new.lora_int_id == old.lora_int_id
    assert answers(engine, new.lora_request) == engine.before["adapter 2"]
    assert answers(engine, fresh.lora_request) == engine.before["adapter 1"]
    assert slept != engine.worker.pool_digests()


@pytest.mark.parametrize("level", [1, 2])
def test_nothing_is_written_while_asleep(engine: Engine, level: int) -> None:
    from vllm.lora.request import LoRARequest

    engine.llm.sleep(level=level)
    before = engine.worker.pool_digests()
    update(engine, 2)
    third = LoRARequest("third", 3, str(engine.folder / "adapter1"))
    engine.llm.llm_engine.add_lora(third)
    engine.llm.llm_engine.add_lora(LoRARequest("fourth", 4, str(engine.folder / "adapter2")))
    engine.llm.llm_engine.remove_lora(4)
    for load in (
        engine.reload,
        lambda: engine.model.load_weights(engine.checkpoint_tensors().items()),
        lambda: engine.reload(weights_iterator=iter(engine.checkpoint_tensors().items())),
    ):
        with pytest.raises(AsleepError, match=f"sleeps at level {level}"):
            load()
    assert engine.worker.pool_digests() == before
    engine.llm.wake_up()
    if level == 2:
        engine.reload()
    assert answers(engine, third) == engine.before["adapter 1"]
    assert engine.ask() == engine.before


@pytest.mark.parametrize("level", [1, 2])
def test_requests_are_refused_while_asleep(engine: Engine, level: int) -> None:
    engine.llm.sleep(level=level)
    with pytest.raises(WeightsMissingError, match=rf"sleeps at level {level}.*wake_up"):
        engine.ask("base")
    engine.llm.wake_up()
    if level == 2:
        engine.reload()
    assert engine.ask() == engine.before


# --- Files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_files(engine: Engine) -> Iterator[Path]:
    """The files of adapter 1, which are as they were afterwards, and read again."""
    folder = engine.folder / "adapter1"
    backup = engine.folder / "backup1"
    shutil.copytree(folder, backup)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    backup.rename(folder)
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    assert engine.ask() == engine.before


def give_files_of_2(engine: Engine, folder: Path) -> None:
    for file in (engine.folder / "adapter2").iterdir():
        shutil.copy(file, folder / file.name)


@pytest.mark.parametrize("level", [1, 2])
def test_changed_files_are_read_at_wake_up(engine: Engine, own_files: Path, level: int) -> None:
    give_files_of_2(engine, own_files)
    assert engine.ask("adapter 1")["adapter 1"] == engine.before["adapter 1"]
    for _ in range(2):  # the second time they are those that were read
        sleep_and_wake(engine, level)
        assert engine.ask("adapter 1")["adapter 1"] == engine.before["adapter 2"]


def test_touched_files_change_nothing(engine: Engine, own_files: Path) -> None:
    registry = engine.worker.lora_reload.adapters.manager.list_adapters
    before = registry()[1]
    os.utime(own_files / "adapter_model.safetensors", (1, 1))
    sleep_and_wake(engine, 2)
    assert registry()[1] is before
    assert engine.ask() == engine.before


def test_changed_adapter_without_a_slot_takes_none(engine: Engine, own_files: Path) -> None:
    manager = engine.worker.lora_reload.adapters.manager
    manager.deactivate_adapter(1)
    slots = list(manager.lora_index_to_id)
    give_files_of_2(engine, own_files)
    sleep_and_wake(engine, 2)
    assert list(manager.lora_index_to_id) == slots
    assert engine.ask("adapter 1")["adapter 1"] == engine.before["adapter 2"]


def test_gone_files_change_nothing(engine: Engine, own_files: Path) -> None:
    shutil.rmtree(own_files)
    for _ in range(3):
        sleep_and_wake(engine, 2)
        assert engine.ask() == engine.before


@pytest.mark.parametrize("level", [1, 2])
def test_unreadable_files_refuse_the_adapter_alone(engine: Engine, own_files: Path, level: int) -> None:
    file = own_files / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:500])
    sleep_and_wake(engine, level)
    with pytest.raises(AdapterMissingError, match=r"adapter 'adapter1' is not there: its files have changed"):
        engine.ask("adapter 1")
    assert engine.ask("base", "adapter 2") == {name: engine.before[name] for name in ("base", "adapter 2")}


def test_scaling_is_not_applied_twice(engine: Engine, own_files: Path) -> None:
    """vLLM folds alpha / r into lora_B in place: four cycles, two of them with files read again."""
    weights = tensors(engine, 1)
    for step in range(4):
        if step % 2:
            save_file(weights, own_files / "adapter_model.safetensors", metadata={"step": str(step)})
        sleep_and_wake(engine, 2)
        assert engine.ask() == engine.before


# --- What cannot be put back --------------------------------------------------------------------------------------


def test_slot_that_cannot_be_restored(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = engine.worker.lora_reload.adapters.manager
    module = next(iter(manager.modules.values()))
    slot = manager.lora_index_to_id.index(1)
    write = module.set_lora

    def fails(index: int, *args: Any, **kwargs: Any) -> None:
        if index == slot:
            raise RuntimeError("no room")
        write(index, *args, **kwargs)

    engine.worker.lora_reload.adapters._writes.clear()
    monkeypatch.setattr(module, "set_lora", fails)
    sleep_and_wake(engine, 2)
    for _ in range(2):
        with pytest.raises(
            AdapterMissingError, match=r"'adapter1' is not there: RuntimeError: no room.*update_adapter"
        ):
            engine.ask("adapter 1")
        assert engine.ask("base", "adapter 2") == {name: engine.before[name] for name in ("base", "adapter 2")}
    monkeypatch.undo()
    sleep_and_wake(engine, 2)
    assert engine.ask() == engine.before


# --- Settings -----------------------------------------------------------------------------------------------------


def test_drop(engine: Engine) -> None:
    engine.worker.lora_reload.settings = Settings(adapters="drop")
    assert engine.llm.llm_engine.list_loras() == {1, 2}
    sleep_and_wake(engine, 2)
    assert engine.llm.llm_engine.list_loras() == set()
    assert engine.ask() == engine.before, "read from disk again"


def test_drop_of_an_adapter_without_files(engine: Engine) -> None:
    """vLLM would look for its files in the midst of a step, and the engine would die."""
    engine.worker.lora_reload.settings = Settings(adapters="drop")
    policy = update(engine, 2).lora_request
    sleep_and_wake(engine, 2)
    with pytest.raises(AdapterMissingError, match="'policy' is not there: it came as tensors and was dropped"):
        answers(engine, policy)
    assert answers(engine, update(engine, 1).lora_request) == engine.before["adapter 1"]


def test_failed_reload_by_itself_leaves_the_engine_awake(engine: Engine) -> None:
    engine.worker.lora_reload.settings = Settings(on_missing="reload")
    away = engine.folder / "away"
    engine.checkpoint.rename(away)
    engine.llm.sleep(level=2)
    engine.llm.wake_up()
    away.rename(engine.checkpoint)
    with pytest.raises(WeightsMissingError, match="the last load failed"):
        engine.ask("base")
    engine.reload()
    assert engine.ask() == engine.before


def test_on_missing_reload(engine: Engine) -> None:
    engine.worker.lora_reload.settings = Settings(on_missing="reload")
    engine.llm.sleep(level=2)
    engine.llm.wake_up(["weights"])
    engine.llm.wake_up(["kv_cache"])
    assert engine.ask() == engine.before


def test_on_missing_warn(engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm_lora_reload import door

    monkeypatch.setattr(engine.llm.llm_engine.engine_core.engine_core.lora_reload, "warn_only", True)
    monkeypatch.setattr(door.logger, "propagate", True)
    monkeypatch.setattr(door.logger, "parent", None)
    door.logger.addHandler(caplog.handler)
    # Not after a sleep: NaN in the KV cache would outlast the test.
    engine.worker.lora_reload.lifecycle.load_failed(OSError("the trainer went away"), wrote=True)
    assert engine.ask("base") == {"base": engine.before["base"]}
    door.logger.removeHandler(caplog.handler)
    assert "Answering although rank 0: base weights are missing" in caplog.text


# --- Prefix cache -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def caching(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("caching"), max_loras=4, enable_prefix_caching=True, block_size=32)


def ask_long(engine: Engine, request: Any) -> tuple[int, list[int]]:
    """How many tokens of a long prompt were found in the cache, and the answer."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": [20 + number % 200 for number in range(150)]}
    (output,) = engine.llm.generate([prompt], greedy, lora_request=request, use_tqdm=False)
    return output.num_cached_tokens, list(output.outputs[0].token_ids)


def test_prefixes_of_older_versions_are_not_used_again(caching: Engine) -> None:
    engine = caching
    policy = update(engine, 1).lora_request
    others = {"base": None, "adapter 1": engine.requests["adapter 1"], "adapter 2": engine.requests["adapter 2"]}
    fresh = {name: ask_long(engine, request) for name, request in others.items()}
    assert ask_long(engine, policy) == (0, fresh["adapter 1"][1])
    assert ask_long(engine, policy)[0] > 100
    assert update(engine, 2).lora_request == policy
    assert ask_long(engine, policy) == (0, fresh["adapter 2"][1])
    assert ask_long(engine, policy)[0] > 100
    for name, request in others.items():
        cached, answer = ask_long(engine, request)
        assert cached > 100 and answer == fresh[name][1]
    update(engine, 1)
    assert ask_long(engine, policy) == (0, fresh["adapter 1"][1]), "nor does an old version come back"


def test_a_name_is_removed_and_comes_again(caching: Engine) -> None:
    """Its id changes, and vLLM's block hash knows it by name: nothing of what went before is found."""
    from vllm.lora.request import LoRARequest

    engine, llm = caching, caching.llm.llm_engine
    right = {number: ask_long(engine, engine.requests[f"adapter {number}"])[1] for number in (1, 2)}
    first = update(engine, 1, name="again").lora_request
    assert ask_long(engine, first) == (0, right[1])
    llm.remove_lora(first.lora_int_id)
    other = LoRARequest("again", 7, str(engine.folder / "adapter2"))
    llm.add_lora(other)
    assert ask_long(engine, other) == (0, right[2])
    second = update(engine, 2, name="again").lora_request
    assert second.lora_int_id == 7 and ask_long(engine, second) == (0, right[2])
    llm.remove_lora(7)
    assert ask_long(engine, LoRARequest("again", 7, str(engine.folder / "adapter1"))) == (0, right[1])
    assert ask_long(engine, LoRARequest("again", 8, str(engine.folder / "adapter2"))) == (0, right[2])
    llm.remove_lora(7)
    llm.remove_lora(8)


def test_load_inplace_of_add_lora_forgets_prefixes(caching: Engine) -> None:
    from vllm.lora.request import LoRARequest

    engine, folder = caching, caching.folder / "rewritten"
    right = {number: ask_long(engine, engine.requests[f"adapter {number}"])[1] for number in (1, 2)}
    for number in (1, 2, 1):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(engine.folder / f"adapter{number}", folder)
        engine.llm.llm_engine.add_lora(LoRARequest("rewritten", 9, str(folder), load_inplace=True))
        for inplace in (False, True):
            request = LoRARequest("rewritten", 9, str(folder), load_inplace=inplace)
            cached, answer = ask_long(engine, request)
            assert answer == right[number] and (cached > 100) is inplace
    engine.llm.llm_engine.remove_lora(9)
