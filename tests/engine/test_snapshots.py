"""Base weights that come back from a snapshot by themselves."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from tests.support.engine import Engine
from tests.support.scenario import Scenario, run
from vllm_lora_reload import WeightsMissingError, keeper, seams
from vllm_lora_reload.keeper import SnapshotKeeper

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("engine")
    setting = {"snapshot_dir": str(folder / "snapshots")}
    return Engine(folder, additional_config={"lora_reload": setting})


@pytest.fixture
def engine(started: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """With a valid snapshot of its checkpoint."""
    monkeypatch.setattr(keeper, "_SETTLED", 0.0)
    backup = started.folder / "backup"
    shutil.copytree(started.checkpoint, backup)
    started.assert_whole()
    assert taken(started)["state"] == "valid"
    yield started
    monkeypatch.undo()
    shutil.rmtree(started.checkpoint)
    backup.rename(started.checkpoint)
    started.reload(weights_path=str(started.checkpoint))
    started.worker.lora_reload._files = started.worker.lora_reload._file_states()  # the same files, moved
    started.ask()


def keeper_of(engine: Engine) -> SnapshotKeeper:
    found: SnapshotKeeper = engine.worker.lora_reload.keeper
    return found


def taken(engine: Engine) -> dict[str, Any]:
    return dict(engine.llm.collective_rpc("lora_reload_take_snapshot")[0])


def status(engine: Engine) -> dict[str, Any]:
    return dict(engine.llm.collective_rpc("lora_reload_status")[0])


def other_weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor + 0.25 for name, tensor in engine.checkpoint_tensors().items()}


def save_other_weights(engine: Engine) -> None:
    """As a trainer that saves into the folder from which the engine was started."""
    for file in engine.checkpoint.glob("*.safetensors"):
        tensors = {name: tensor + 0.25 for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def no_loader(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's loader must not be asked."""

    def get_all_weights(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("loaded from the checkpoint")

    monkeypatch.setattr(
        "vllm.model_executor.model_loader.default_loader.DefaultModelLoader.get_all_weights", get_all_weights
    )


@pytest.mark.usefixtures("no_loader")
def test_cycles_without_a_load(engine: Engine) -> None:
    """Bytes of the whole pool, answers of base and adapters, with the checkpoint out of reach."""
    away = engine.checkpoint.with_name("away")
    engine.checkpoint.rename(away)
    try:
        for _ in range(3):
            engine.lose_weights()
            engine.assert_whole()
            last = status(engine)["last_restore"]
            assert last["source"] == "snapshot" and last["bytes"] > 500_000
    finally:
        away.rename(engine.checkpoint)


def test_single_tensors_can_be_loaded_after_it(engine: Engine) -> None:
    """None counts as missing any more."""
    engine.lose_weights()
    name, tensor = next(iter(engine.checkpoint_tensors().items()))
    engine.model.load_weights([(name, tensor)])
    engine.assert_whole()


@pytest.mark.usefixtures("no_loader")
def test_reload_after_it_is_a_no_op(engine: Engine) -> None:
    engine.lose_weights()
    engine.reload()
    engine.assert_whole()
    with pytest.raises(Exception, match="loaded from the checkpoint"):
        engine.reload(weights_path=str(engine.checkpoint))


def test_reload_is_none_if_memory_is_not_what_it_should_be(engine: Engine) -> None:
    """Somebody wrote into a parameter by hand."""
    engine.lose_weights()
    with torch.no_grad():
        next(iter(engine.model.parameters())).fill_(7)
    engine.reload()
    engine.assert_whole()


def test_reload_loads_a_checkpoint_that_changed(engine: Engine) -> None:
    """And the snapshot is stale then: after the next sleep the weights are missing, not old."""
    save_other_weights(engine)
    engine.lose_weights()
    assert engine.differing() == []  # as it was when they were discarded
    engine.reload()
    new = engine.ask()
    assert new["base"] != engine.before["base"]
    engine.lose_weights()
    with pytest.raises(WeightsMissingError, match="base weights are missing"):
        engine.ask()
    assert "other weights were loaded since it was written" in status(engine)["snapshot"]["reason"]
    engine.reload()
    assert engine.ask() == new


def in_place(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def through_a_hard_link(file: Path, content: bytes) -> None:
    other = file.with_suffix(".other")
    os.link(file, other)
    other.write_bytes(content)
    other.unlink()


@pytest.mark.parametrize("rewrite", [in_place, through_a_hard_link])
def test_reload_loads_a_checkpoint_whose_times_were_put_back(
    engine: Engine, rewrite: Callable[[Path, bytes], None]
) -> None:
    for file in engine.checkpoint.glob("*.safetensors"):
        status = file.stat()
        content = save({name: tensor + 0.25 for name, tensor in load_file(file).items()}, metadata={"format": "pt"})
        assert len(content) == status.st_size
        rewrite(file, content)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    engine.reload()
    assert engine.ask("base")["base"] != engine.before["base"]


@pytest.fixture
def no_snapshot(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Have the engine without one, for some reason. A writer that waits goes on when what comes back is set."""
    reached, go = threading.Event(), threading.Event()
    write = os.pwrite

    def pwrite(fd: int, data: Any, at: int) -> int:
        reached.set()
        assert go.wait(60)
        return write(fd, data, at)

    def without(why: str) -> threading.Event:
        kept = keeper_of(engine)
        assert kept.snapshot is not None
        kept.snapshot.forget()
        kept.snapshot, kept.reason = None, None
        if why == "a full disk":
            monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
            assert "No space left" in str(taken(engine)["reason"])
            monkeypatch.setattr(shutil, "disk_usage", usage)
        elif why == "it is being written":
            monkeypatch.setattr(os, "pwrite", pwrite)
            kept._start(write=True)
            assert reached.wait(60)
        else:
            assert why == "never begun"
        return go

    usage = shutil.disk_usage
    yield without
    go.set()


@pytest.mark.parametrize("why", ["never begun", "it is being written", "a full disk"])
def test_asleep_without_a_snapshot(engine: Engine, no_snapshot: Callable[[str], threading.Event], why: str) -> None:
    """The checkpoint has the same: its weights are there after the same wake-up."""
    go = no_snapshot(why)
    engine.llm.sleep(level=2)
    engine.llm.wake_up(["weights"])
    woken = status(engine)
    engine.llm.wake_up(["kv_cache"])
    assert woken["state"] == "complete" and (woken["last_restore"] or {}).get("source") != "snapshot"
    engine.assert_whole()
    assert keeper_of(engine).writing == (why == "it is being written")
    go.set()
    assert taken(engine)["state"] == "valid"
    engine.lose_weights()
    assert status(engine)["last_restore"]["source"] == "snapshot"


@pytest.mark.parametrize("rank_is_right", [True, False])
def test_without_a_snapshot_and_with_another_checkpoint(
    engine: Engine, no_snapshot: Callable[[str], threading.Event], rank_is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are told why. It is no other if only another rank sees another one: all go the same way."""
    no_snapshot("never begun")
    if rank_is_right:
        monkeypatch.setattr(seams, "true_on_all_ranks", lambda value: False)
    else:
        save_other_weights(engine)
    engine.lose_weights()
    with pytest.raises(WeightsMissingError, match=r"no snapshot has them: .*; nor does the checkpoint, whose files"):
        engine.ask("base")
    monkeypatch.undo()


def test_without_a_snapshot_of_other_weights(engine: Engine, no_snapshot: Callable[[str], threading.Event]) -> None:
    """The checkpoint never had them."""
    no_snapshot("never begun")
    engine.model.load_weights(other_weights(engine).items())
    engine.lose_weights()
    with pytest.raises(WeightsMissingError, match="base weights are missing") as told:
        engine.ask("base")
    assert "nor does the checkpoint" not in str(told.value)
    engine.llm.sleep(level=2)  # missing even before
    engine.llm.wake_up()
    assert status(engine)["state"] == "missing"


def test_a_loaded_buffer_counts(engine: Engine) -> None:
    """Loads bring buffers too, and vLLM keeps them over the sleep, whatever is in them."""
    state = engine.worker.lora_reload
    module, name = next((m, n) for m in engine.model.modules() for n in m._buffers if n == "_k_scale")
    state.coverage._loaded_buffers.append((module, name))
    buffer, value = module._buffers[name], module._buffers[name].clone()
    try:
        keeper_of(engine).snapshot = None
        keeper_of(engine)._first = []
        keeper_of(engine).started()
        assert taken(engine)["state"] == "valid" and state.has_checkpoint()
        buffer.fill_(7)
        assert not state.has_checkpoint()
        engine.llm.sleep(level=2)
        assert not keeper_of(engine).usable
        engine.llm.wake_up()
    finally:
        buffer.copy_(value)
        state.coverage._loaded_buffers.remove((module, name))
        engine.reload()
        keeper_of(engine)._first = []
        keeper_of(engine).started()
        taken(engine)


def test_given_weights_are_loaded(engine: Engine) -> None:
    engine.lose_weights()
    engine.reload(weights_iterator=iter(other_weights(engine).items()))
    assert engine.ask()["base"] != engine.before["base"]


def test_every_version_has_a_snapshot_if_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_of(engine), "_when", "always")
    engine.model.load_weights(other_weights(engine).items())
    new = engine.ask()
    assert new["base"] != engine.before["base"]
    assert taken(engine)["state"] == "valid"
    engine.lose_weights()
    assert status(engine)["last_restore"]["source"] == "snapshot"
    assert engine.ask() == new
    engine.reload()  # asks for the checkpoint, which is something else
    engine.assert_whole()


def flip(file: Path) -> None:
    stat = file.stat()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def cut(file: Path) -> None:
    os.truncate(file, 5000)


def other(file: Path) -> None:
    file.write_bytes(b"something else")


def test_a_snapshot_that_somebody_removed_serves_on(engine: Engine) -> None:
    Path(taken(engine)["path"]).unlink()
    engine.lose_weights()
    engine.assert_whole()
    assert status(engine)["last_restore"]["source"] == "snapshot"


@pytest.mark.parametrize("harm", [flip, cut, other])
def test_a_damaged_snapshot_is_not_used(engine: Engine, harm: Callable[[Path], None]) -> None:
    """The checkpoint is loaded instead, as it has the same; and a new snapshot is written."""
    harm(Path(taken(engine)["path"]))
    engine.lose_weights()
    engine.assert_whole()
    assert (status(engine)["last_restore"] or {}).get("source") != "snapshot"
    assert taken(engine)["state"] == "valid"
    engine.lose_weights()
    engine.assert_whole()
    assert status(engine)["last_restore"]["source"] == "snapshot"


def test_damage_and_no_checkpoint_with_the_same(engine: Engine) -> None:
    """Nothing has these weights any more: requests are refused, and told why."""
    engine.model.load_weights(other_weights(engine).items())
    flip(Path(taken(engine)["path"]))
    engine.lose_weights()
    with pytest.raises(WeightsMissingError, match=r"the snapshot could not be restored: SnapshotError: .* is damaged"):
        engine.ask()
    engine.reload()
    engine.assert_whole()


def test_damage_and_the_checkpoint_is_gone(engine: Engine) -> None:
    flip(Path(taken(engine)["path"]))
    away = engine.checkpoint.with_name("away")
    engine.checkpoint.rename(away)
    try:
        engine.lose_weights()
        with pytest.raises(WeightsMissingError):
            engine.ask()
    finally:
        away.rename(engine.checkpoint)
    engine.reload()
    engine.assert_whole()


def test_level_1_and_updates_of_adapters_leave_it_alone(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    assert taken(engine) == status(engine)["snapshot"]
    engine.lose_weights()
    engine.assert_whole()


def test_buffers_can_be_freed(engine: Engine) -> None:
    engine.lose_weights()
    pinned = status(engine)["ring_bytes"]
    assert pinned > 0
    assert engine.llm.collective_rpc("lora_reload_free_buffers") == [pinned]
    assert status(engine)["ring_bytes"] == 0
    engine.lose_weights()
    engine.assert_whole()


def test_without_the_setting(shared_engine: Engine) -> None:
    reason = "the setting snapshot_dir is empty"
    assert taken(shared_engine)["reason"] == reason
    assert status(shared_engine)["snapshot"] is None


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(engine={"tensor_parallel_size": 2}, control="unwritten+snapshot"),
        pytest.param(Scenario(family="qwen3_tied"), marks=pytest.mark.slow),
        pytest.param(Scenario(quantization="awq"), marks=pytest.mark.slow),
    ],
    ids=["two ranks", "tied", "awq"],
)
def test_other_engines(scenario: Scenario, tmp_path: Path) -> None:
    scenario.ways = ("snapshot",)
    scenario.engine["additional_config"] = {"lora_reload": {"snapshot_dir": str(tmp_path)}}
    report = run(scenario, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert report.right and len(report.cycles) == 2 and report.distinct_answers == 3, report
    ranks = scenario.engine.get("tensor_parallel_size", 1)
    assert all(cycle.restored == ["snapshot"] * ranks for cycle in report.cycles), report
    if report.control is None:
        assert len(list(tmp_path.glob("*/*.safetensors"))) == ranks
    else:  # the last rank's was not written, or damaged and is removed: all ranks load the checkpoint
        assert report.control.right and report.control.restored == ["checkpoint"] * ranks, report
