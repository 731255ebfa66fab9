"""Loads that fail: every way to load weights times every fault, on a real engine in this process.

Not here: a file that is cut short in place while it is mapped. The kernel ends the process (SIGBUS).
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from tests.matrix.transfer import InProcessEngine
from tests.support.engine import Engine
from vllm_lora_reload import WeightsMissingError
from vllm_lora_reload.ring import Ring

pytestmark = pytest.mark.engine

Pair = tuple[str, torch.Tensor]
Tensors = dict[str, torch.Tensor]

VICTIM = "model.layers.1.mlp.down_proj.weight"
EXTRA = "model.layers.7.mlp.down_proj.weight"
CHUNK = 6  # no boundary where the streams below break off
LOST = "the trainer went away"


# --- Ways to load -------------------------------------------------------------------------------------------------


def reload_iterator(engine: Engine, pairs: Iterable[Pair]) -> None:
    engine.reload(weights_iterator=iter(pairs))


def reload_kernel_format(engine: Engine, pairs: Iterable[Pair]) -> None:
    engine.reload(weights_iterator=iter(pairs), is_checkpoint_format=False)


def load_at_once(engine: Engine, pairs: Iterable[Pair]) -> None:
    engine.model.load_weights(iter(pairs))


def load_one_a_call(engine: Engine, pairs: Iterable[Pair]) -> None:
    """Every call has an iterator of its own, and that is what breaks."""
    rest = iter(pairs)
    more = True

    def one() -> Iterator[Pair]:
        nonlocal more
        pair = next(rest, None)
        more = pair is not None
        if pair is not None:
            yield pair

    while more:
        engine.model.load_weights(one())


def transfer(engine: Engine, pairs: Iterable[Pair]) -> None:
    """A session of several chunks."""
    rest = iter(pairs)
    more = True

    def chunk() -> Iterator[Pair]:
        nonlocal more
        for _ in range(CHUNK):
            pair = next(rest, None)
            more = pair is not None
            if pair is None:
                return
            yield pair

    engine.llm.collective_rpc("start_weight_update")
    while more:
        engine.llm.collective_rpc("update_weights", args=({"weights": chunk()},))
    engine.llm.collective_rpc("finish_weight_update")


def reload_disk(engine: Engine, folder: Path) -> None:
    """With the engine's own loader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner.lora_reload, "plan", None)
        engine.reload()


def reload_replay(engine: Engine, folder: Path) -> None:
    """By the plan of the first load; with the engine's loader where that does not work."""
    engine.reload()


def reload_other_path(engine: Engine, folder: Path) -> None:
    engine.reload(weights_path=str(folder))


FROM_TENSORS: dict[str, Callable[[Engine, Iterable[Pair]], None]] = {
    "iterator": reload_iterator,
    "kernel format": reload_kernel_format,
    "at once": load_at_once,
    "one a call": load_one_a_call,
    "transfer": transfer,
}
FROM_FILES: dict[str, Callable[[Engine, Path], None]] = {
    "disk": reload_disk,
    "replay": reload_replay,
    "other path": reload_other_path,
}
WAYS = [*FROM_FILES, *FROM_TENSORS]


class Case:
    """One way to load the weights that the engine started with, and the means to spoil it."""

    def __init__(self, engine: Engine, way: str) -> None:
        self.engine, self.way = engine, way
        self.folder = engine.checkpoint
        if way == "other path":
            self.folder = engine.folder / "other"
            shutil.copytree(engine.checkpoint, self.folder)
        self.whole = {file: file.read_bytes() for file in self.folder.iterdir()}
        if way == "kernel format":
            self.tensors: Tensors = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
        else:
            self.tensors = engine.checkpoint_tensors()
        self.tree = self.module_tree()

    def module_tree(self) -> dict[str, Any]:
        """Every module, parameter and buffer by name: the objects themselves, and what loads them."""
        named = (self.engine.model.named_modules, self.engine.model.named_parameters, self.engine.model.named_buffers)
        return {
            name: (id(found), getattr(getattr(found, "weight_loader", None), "__name__", None))
            for walk in named
            for name, found in walk(remove_duplicate=False)
        }

    def name(self, tensor: str) -> str:
        """What this way calls a tensor of the checkpoint."""
        if self.way == "kernel format":
            tensor = re.sub("[qkv]_proj", "qkv_proj", re.sub("(gate|up)_proj", "gate_up_proj", tensor))
            return next(n for n in self.tensors if n.replace(".base_layer.", ".") == tensor)
        return tensor

    def file_of(self, tensor: str) -> Path:
        index = json.loads((self.folder / "model.safetensors.index.json").read_text())
        return self.folder / str(index["weight_map"][tensor])

    def load(self, change: Callable[[Tensors], Tensors] | None = None, among: str = VICTIM) -> None:
        """Load, after `change` to all tensors, or where files are read, to those in the file that holds `among`."""
        if self.way in FROM_TENSORS:
            FROM_TENSORS[self.way](self.engine, (change(self.tensors) if change else self.tensors).items())
            return
        if change:
            file = self.file_of(among)
            save_file(change(load_file(file)), file, metadata={"format": "pt"})
        FROM_FILES[self.way](self.engine, self.folder)

    def mend(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for file, content in self.whole.items():
            file.write_bytes(content)

    def state(self) -> str | None:
        status: dict[str, str | None] = self.engine.llm.collective_rpc("lora_reload_status")[0]
        return status["state"]

    def assert_survived(self, state: str, why: str = "the last load failed") -> None:
        """Nothing is torn; requests are refused or answered as before; the same way, unspoiled, repairs everything."""
        assert self.engine.worker.meta_tensors() == []
        assert self.module_tree() == self.tree
        if state == "missing":
            # Asked before the state is, which would make the front end look again.
            with pytest.raises(WeightsMissingError, match=why):
                self.engine.ask("base")
        else:
            assert self.engine.differing() == []
        assert self.state() == state
        self.mend()
        self.load()
        self.assert_whole()

    def assert_whole(self) -> None:
        """As `Engine.assert_whole`, with one of the three answers: all bytes are compared anyway."""
        assert self.state() == "complete"
        assert self.engine.worker.meta_tensors() == []
        assert self.module_tree() == self.tree
        assert self.engine.differing() == []
        assert self.engine.ask("adapter 2") == {"adapter 2": self.engine.before["adapter 2"]}


@pytest.fixture(scope="module")
def with_transfer(shared_engine: Engine) -> Iterator[Engine]:
    """The shared engine with a weight transfer engine, as if its config had one."""
    worker = shared_engine.worker
    config = WeightTransferConfig()
    worker.weight_transfer_engine = InProcessEngine(config, worker.vllm_config, worker.device, shared_engine.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "synchronize", lambda *args: None)  # there is no accelerator
        yield shared_engine
    worker.weight_transfer_engine = None
    shared_engine.ask()
    shared_engine.assert_whole()


@pytest.fixture(params=WAYS)
def case(request: pytest.FixtureRequest, with_transfer: Engine) -> Iterator[Case]:
    yield from make_case(with_transfer, request.param)


@pytest.fixture(params=list(FROM_FILES))
def files(request: pytest.FixtureRequest, with_transfer: Engine) -> Iterator[Case]:
    yield from make_case(with_transfer, request.param)


def make_case(engine: Engine, way: str) -> Iterator[Case]:
    case = Case(engine, way)
    yield case
    case.mend()
    if way == "other path":
        shutil.rmtree(case.folder)
    engine.worker._weight_update_active = False  # a test that failed may have left a session open
    engine.reload(weights_path=str(engine.checkpoint))
    if engine.differing():  # the test failed, and had answers that changed metadata
        engine.ask()
    assert engine.differing() == [], "not repaired for the tests that follow"


@pytest.fixture(params=[False, True], ids=["awake", "asleep"])
def asleep(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# --- Loads that break off -----------------------------------------------------------------------------------------


class BreaksOff(Tensors):
    """Tensors of which a reader gets only the first few."""

    def __init__(self, tensors: Iterable[Pair], stop: int) -> None:
        super().__init__(tensors)
        self.stop = stop

    def items(self) -> Any:
        return breaks_off(super().items(), self.stop)


def breaks_off(pairs: Iterable[Pair], stop: int) -> Iterator[Pair]:
    for number, pair in enumerate(pairs):
        if number == stop:
            raise OSError(LOST)
        yield pair


def unreadable(*args: Any) -> None:
    raise OSError(LOST)


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_exception_on_the_way(case: Case, position: str, asleep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = {"first": 0, "middle": len(case.tensors) // 2, "last": len(case.tensors) - 1}[position]
    read = DefaultModelLoader.get_all_weights
    if asleep:
        case.engine.lose_weights()
    with pytest.raises(OSError, match=LOST) as caught, monkeypatch.context() as patch:
        patch.setattr(DefaultModelLoader, "get_all_weights", lambda *args: breaks_off(read(*args), stop))
        patch.setattr(Ring, "read", unreadable)
        case.load((lambda tensors: BreaksOff(tensors.items(), stop)) if case.way in FROM_TENSORS else None)
    # Where each tensor has a call of its own, the broken call brings none that could be named.
    named = position != "first" and case.way != "one a call"
    assert ("while loading " in str(caught.value)) is named
    if named and case.way in FROM_FILES:
        assert f" from {case.folder}" in str(caught.value)
    # A replay may have written before its first tensor, for all the package knows.
    nothing_written = case.way == "one a call" or (position == "first" and case.way != "replay")
    kept = nothing_written and not asleep
    case.assert_survived("complete" if kept else "missing")


@pytest.mark.parametrize("case", ["at once"], indirect=True)
def test_front_end_hears_of_a_direct_load(case: Case) -> None:
    """Nothing passes through the front end between its last look at the workers and the request."""
    case.engine.ask()
    with pytest.raises(Exception, match=VICTIM):
        case.load(lambda tensors: BAD_TENSORS["a row too few"](case, tensors))
    with pytest.raises(WeightsMissingError, match=VICTIM):
        case.engine.ask("base")
    case.load()
    assert case.engine.ask("adapter 2") == {"adapter 2": case.engine.before["adapter 2"]}


# --- Tensors that are not as they should be -----------------------------------------------------------------------


BAD_TENSORS: dict[str, Callable[[Case, Tensors], Tensors]] = {
    "a row too few": lambda case, tensors: tensors | {case.name(VICTIM): tensors[case.name(VICTIM)][:-1]},
    # Both could be broadcast.
    "one column": lambda case, tensors: tensors | {case.name(VICTIM): tensors[case.name(VICTIM)][:, :1].clone()},
    "one number": lambda case, tensors: tensors | {case.name(VICTIM): torch.ones(1)},
    "unknown name": lambda case, tensors: tensors | {EXTRA: torch.zeros(4, 4)},
}


@pytest.mark.parametrize("fault", BAD_TENSORS)
def test_bad_tensor(case: Case, fault: str, asleep: bool) -> None:
    if asleep:
        case.engine.lose_weights()
    where = f"while loading {EXTRA if fault == 'unknown name' else VICTIM}"
    if case.way in FROM_FILES:
        where += f" from {case.file_of(VICTIM)}"
    with pytest.raises(Exception, match=re.escape(where)):
        case.load(lambda tensors: BAD_TENSORS[fault](case, tensors))
    # A call that wrote nothing has changed nothing, and the unknown name comes when all others are there.
    unchanged = case.way == "one a call" and (not asleep or fault == "unknown name")
    case.assert_survived("complete" if unchanged else "missing", re.escape(where))


@pytest.mark.parametrize("way", ["at once", "iterator", "kernel format", "transfer"])
@pytest.mark.parametrize("fault", BAD_TENSORS)
@pytest.mark.parametrize("case", ["one a call"], indirect=True)
def test_a_refused_tensor_after_all_others_changes_nothing(
    case: Case, fault: str, way: str, asleep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redundant tied weight that vLLM rejects, say: complete weights are not given up for it."""
    if asleep:
        case.engine.lose_weights()
        case.load()
    case.way = way
    name = EXTRA if fault == "unknown name" else case.name(VICTIM) if way != "kernel format" else VICTIM
    shapes = {"a row too few": (63, 128), "one column": (64, 1), "one number": (1,), "unknown name": (4, 4)}
    with pytest.raises(Exception, match=re.escape(name)):
        FROM_TENSORS[way](case.engine, [(name, torch.zeros(shapes[fault]))])
    case.way = "one a call"
    case.assert_whole()
    assert case.engine.ask("base") == {"base": case.engine.before["base"]}


@pytest.mark.parametrize("left_out", [VICTIM, "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"])
def test_tensor_left_out(case: Case, left_out: str, asleep: bool) -> None:
    """vLLM only warns. What was not lost keeps its value, also where it is a part of a fused layer."""
    if asleep:
        case.engine.lose_weights()
    name = case.name(left_out)
    case.load(lambda tensors: {n: t for n, t in tensors.items() if n != name}, among=left_out)
    parameter = left_out.replace("k_proj", "qkv_proj")
    case.assert_survived("missing" if asleep else "complete", re.escape(f"1 of 15 tensors ({parameter})"))


def test_more_digits(case: Case) -> None:
    """Values are those of the checkpoint, in a wider type."""
    case.engine.lose_weights()
    name = case.name(VICTIM)
    case.load(lambda tensors: tensors | {name: tensors[name].float()})
    case.assert_survived("complete")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_values_of_another_dtype_are_converted(case: Case, dtype: torch.dtype) -> None:
    """By vLLM, without a word, whatever they mean. This package does not look at values."""
    case.engine.lose_weights()
    name = case.name(VICTIM)
    given = case.tensors[name].mul(100).to(dtype)
    case.load(lambda tensors: tensors | {name: given})
    assert case.state() == "complete"
    assert case.engine.differing() == [f"{VICTIM.replace('.weight', '.base_layer.weight')}[0]"]
    assert torch.equal(case.engine.model.model.layers[1].mlp.down_proj.base_layer.weight, given.bfloat16())


# --- Files that are not as they should be -------------------------------------------------------------------------


def overwrite(file: Path, at: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


def index_of(file: Path) -> Path:
    return file.parent / "model.safetensors.index.json"


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def name_absent_file(file: Path) -> None:
    index = json.loads(index_of(file).read_text())
    index["weight_map"][VICTIM] = "absent.safetensors"
    index_of(file).write_text(json.dumps(index))


# What is done to a shard. Those that vLLM finds out only when it comes to that shard:
BAD_SHARDS: dict[str, Callable[[Path], Any]] = {
    "cut in half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "cut in header": lambda file: os.truncate(file, 30),
    "empty": lambda file: os.truncate(file, 0),
    "header overwritten": lambda file: overwrite(file, 8, b"\xff" * 16),
    "header without shape": lambda file: overwrite(file, file.read_bytes().index(b"shape"), b"shapf"),
    "header length absurd": lambda file: overwrite(file, 0, b"\xff" * 8),
    "header length short": lambda file: overwrite(file, 0, (40).to_bytes(8, "little")),
    "a folder": replace_by_folder,
}
# Those that it finds out before it reads a tensor, and the file that is to be named.
BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shard gone": (Path.unlink, "model-00002-of-00003.safetensors"),
    "index damaged": (lambda file: overwrite(index_of(file), 0, b"####"), "model.safetensors.index.json"),
    "index empty": (lambda file: os.truncate(index_of(file), 0), "model.safetensors.index.json"),
    "index without map": (lambda file: index_of(file).write_text("{}"), "model.safetensors.index.json"),
    "index names absent file": (name_absent_file, "absent.safetensors"),
    "folder gone": (lambda file: shutil.rmtree(file.parent), ""),
}


@pytest.mark.parametrize(
    ("fault", "shard"), [*((fault, 1) for fault in BAD_SHARDS), ("cut in half", 0), ("cut in half", 2)]
)
def test_bad_shard(files: Case, fault: str, shard: int, asleep: bool) -> None:
    file = sorted(files.folder.glob("*.safetensors"))[shard]
    BAD_SHARDS[fault](file)
    if asleep:
        files.engine.lose_weights()
    with pytest.raises(Exception, match=re.escape(f"{file} is damaged")):
        files.load()
    files.assert_survived("missing" if asleep or shard else "complete", re.escape(str(file)))


@pytest.mark.parametrize("fault", BAD_FOLDERS)
def test_bad_folder(files: Case, fault: str, asleep: bool) -> None:
    spoil, named = BAD_FOLDERS[fault]
    spoil(sorted(files.folder.glob("*.safetensors"))[1])
    if asleep:
        files.engine.lose_weights()
    with pytest.raises(Exception, match=re.escape(str(files.folder / named))):
        files.load()
    files.assert_survived("missing" if asleep else "complete", re.escape(str(files.folder / named)))


def test_no_index(files: Case) -> None:
    """vLLM reads every shard that is there."""
    files.engine.lose_weights()
    index_of(files.folder / "any").unlink()
    files.load()
    files.assert_survived("complete")


@pytest.mark.parametrize("shard", [0, 2], ids=["the open one", "one to come"])
def test_shard_replaced_while_loading(files: Case, shard: int, asleep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is open stays the old one; a replay opens it a second time, and then asks the engine's loader."""
    file = sorted(files.folder.glob("*.safetensors"))[shard]
    read, read_by_ring = DefaultModelLoader.get_all_weights, Ring.read

    def replace() -> None:
        torn = file.with_suffix(".part")
        torn.write_bytes(file.read_bytes()[:-100])
        os.replace(torn, file)

    def replacing(*args: Any) -> Iterator[Pair]:
        for number, pair in enumerate(read(*args)):
            if number == 2 and files.way != "replay":
                replace()
            yield pair

    def replacing_before(self: Ring, wanted: Any) -> None:
        replace()
        read_by_ring(self, wanted)

    if asleep:
        files.engine.lose_weights()
    with monkeypatch.context() as patch:
        patch.setattr(DefaultModelLoader, "get_all_weights", replacing)
        patch.setattr(Ring, "read", replacing_before)
        if whole := shard == 0 and files.way != "replay":
            files.load()
        else:
            with pytest.raises(Exception, match=re.escape(f"{file} is damaged")):
                files.load()
    files.assert_survived("complete" if whole else "missing", re.escape(str(file)))


@pytest.mark.parametrize("case", ["disk"], indirect=True)
def test_old_folder_is_read_again_after_a_bad_path(case: Case, tmp_path: Path, asleep: bool) -> None:
    """The refusal tells callers to reload without naming a path."""
    if asleep:
        case.engine.lose_weights()
    with pytest.raises(Exception, match=str(tmp_path)):
        case.engine.reload(weights_path=str(tmp_path))
    case.assert_survived("missing" if asleep else "complete", str(tmp_path))


# --- Weight transfer sessions that do not end as they should ------------------------------------------------------


@pytest.mark.parametrize("case", ["transfer"], indirect=True)
def test_finish_fails(case: Case, asleep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if asleep:
        case.engine.lose_weights()

    def fail(self: InProcessEngine) -> None:
        raise RuntimeError(LOST)

    with pytest.raises(RuntimeError, match=LOST), monkeypatch.context() as patch:
        patch.setattr(InProcessEngine, "finish_weight_update", fail)
        case.load()
    case.assert_survived("missing")


@pytest.mark.parametrize("case", ["transfer"], indirect=True)
def test_chunk_after_a_failed_one(case: Case) -> None:
    """vLLM ends a session with its first failure, and says so."""
    with pytest.raises(Exception, match=VICTIM):
        case.load(lambda tensors: BAD_TENSORS["a row too few"](case, tensors))
    with pytest.raises(RuntimeError, match="start_weight_update must be called"):
        case.engine.llm.collective_rpc("update_weights", args=({"weights": []},))
    case.assert_survived("missing")


@pytest.mark.parametrize("case", ["transfer"], indirect=True)
@pytest.mark.parametrize("then", ["from disk", "another session"])
def test_session_left_open(case: Case, then: str, asleep: bool) -> None:
    """The trainer dies between two chunks. A reload from disk ends the session, and makes room for another."""
    engine, name = case.engine, "model.layers.0.self_attn.q_proj.weight"
    if asleep:
        engine.lose_weights()
    engine.llm.collective_rpc("start_weight_update")
    engine.llm.collective_rpc("update_weights", args=({"weights": [(name, case.tensors[name])]},))
    assert case.state() == ("missing" if asleep else "loading")
    engine.reload()
    assert case.module_tree() == case.tree
    assert case.state() == "complete"
    if then == "another session":
        case.load()
    case.assert_whole()


# --- Sessions that a trainer leaves open --------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["transfer"], indirect=True)
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("chunks", [0, 4])
def test_a_session_over_a_sleep(case: Case, level: int, chunks: int) -> None:
    """The sleep ends it with every layer in its place, and the trainer is told to begin again."""
    rpc = case.engine.llm.collective_rpc
    pairs = list(case.tensors.items())
    rpc("start_weight_update")
    for number in range(chunks):
        rpc("update_weights", args=({"weights": pairs[number * CHUNK : (number + 1) * CHUNK]},))
    assert case.engine.worker.meta_tensors() != []
    (status,) = rpc("lora_reload_status")
    assert status["state"] == "loading" and "has taken layers of the model apart" in status["apart"]
    case.engine.llm.sleep(level=level)
    assert case.engine.worker.meta_tensors() == [] and case.module_tree() == case.tree
    case.engine.llm.wake_up()
    again = rf"sleep\(level={level}\) has ended the session: call start_weight_update and send all weights again"
    for method, args in (("update_weights", ({"weights": pairs[:CHUNK]},)), ("finish_weight_update", ())):
        with pytest.raises(RuntimeError, match=again):
            rpc(method, args=args)
    # Layers of one tensor are whole after one chunk, and may be others than before.
    if level == 1 and not chunks:
        assert case.state() == "complete" and case.engine.differing() == []
    else:
        assert case.state() == "missing"
        with pytest.raises(
            WeightsMissingError, match="discarded" if level == 2 else "came before finish_weight_update"
        ):
            case.engine.ask("base")
    case.load()
    case.assert_whole()


@pytest.mark.parametrize("case", ["transfer"], indirect=True)
def test_a_kernel_format_session_over_a_sleep(case: Case) -> None:
    """Nothing of it is on the meta device. Later releases always take checkpoint format."""
    rpc = case.engine.llm.collective_rpc
    if "is_checkpoint_format" not in inspect.signature(GPUWorker.start_weight_update).parameters:
        pytest.skip("the release has none")
    rpc("start_weight_update", kwargs={"is_checkpoint_format": False})
    case.engine.lose_weights()
    assert case.state() == "missing"
    case.load()
    case.assert_whole()


@pytest.mark.parametrize("case", ["transfer"], indirect=True)
def test_a_reload_ends_a_session(case: Case) -> None:
    rpc = case.engine.llm.collective_rpc
    rpc("start_weight_update")
    rpc("update_weights", args=({"weights": list(case.tensors.items())[:CHUNK]},))
    case.engine.reload()
    with pytest.raises(RuntimeError, match="reload_weights has ended the session"):
        rpc("finish_weight_update")
    case.assert_whole()
