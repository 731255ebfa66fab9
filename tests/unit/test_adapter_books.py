"""What a worker keeps of its adapters: memory of its own, all of an update or nothing, and no names for ever."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.manager import adapter, make_manager
from vllm_lora_reload import adapters as adapters_module
from vllm_lora_reload import seams
from vllm_lora_reload.adapters import Adapters, Source, Staged, fingerprint
from vllm_lora_reload.lora_state import LoRAState
from vllm_lora_reload.staging import FOLLOWS, NO_FILES


class Worker:
    """A ``WorkerLoRAManager`` that reads what `folders` has at a request's path, and steps as vLLM does."""

    lora_config = SimpleNamespace(max_lora_rank=16)

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.folders: dict[str, float] = {}
        self.read: list[str] = []

    def _load_adapter(self, request: Any) -> Any:
        self.read.append(request.lora_path)
        if request.lora_path not in self.folders:
            raise FileNotFoundError(f"{request.lora_path} is nowhere")
        made = adapter(request.lora_int_id)
        made.loras["up"].lora_a = torch.full((4,), self.folders[request.lora_path])
        return made

    def staged(self, request: Any) -> Staged:
        source = Source(request, fingerprint(request.lora_path))
        return Staged(request.lora_name, self._load_adapter(request), source)

    def _apply_adapters(self, requests: Any) -> None:
        for request in requests:
            if request.lora_int_id not in self.manager.list_adapters() or request.load_inplace:
                self.add_adapter(request)
            self.manager.activate_adapter(request.lora_int_id)

    def add_adapter(self, request: Any) -> None:
        if request.lora_int_id in self.manager.list_adapters() and not request.load_inplace:
            return
        made = self._load_adapter(request)
        self.manager.remove_adapter(made.id)
        if len(self.manager) + 1 > self.manager.capacity:
            self.manager.remove_oldest_adapter()
        self.manager._registered_adapters[made.id] = made

    def remove_adapter(self, number: int) -> bool:
        return bool(self.manager.remove_adapter(number))


@pytest.fixture
def manager() -> Any:
    made = make_manager()
    made.packed_modules = {}
    return made


@pytest.fixture
def adapters(manager: Any) -> Adapters:
    lora = LoRAState(nn.ModuleDict(manager.modules), manager, torch.device("cpu"))
    return Adapters(Worker(manager), manager, lora)


def request(name: str = "policy", number: int = 9, path: str = "", inplace: bool = False) -> Any:
    made = seams.lora_request(name, number, path or f"{NO_FILES}{name}")
    made.load_inplace = inplace
    return made


def stage(adapters: Adapters, name: str, number: int, value: float | None = None, path: str | None = None) -> None:
    made = adapter(number)
    made.loras["up"].lora_a.fill_(number if value is None else value)
    source = Source(request(name, number, path), fingerprint(path)) if path else None
    adapters._staged[name] = Staged(name, made, source)


def folder(adapters: Adapters, at: Path, value: float) -> str:
    at.mkdir(exist_ok=True)
    (at / "adapter_config.json").write_text(str(value))
    adapters.worker_manager.folders[str(at)] = value
    return str(at)


def in_slot(manager: Any, number: int) -> float:
    return float(manager.modules["up"].a_stacked[seams.slots(manager).index(number), 0])


# --- Memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [False, True])
def test_tensors_of_a_request_stay_the_callers(
    adapters: Adapters, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handed over in pinned buffers, say: vLLM scales them in place, and the trainer uses the buffer again."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: pinned)
    theirs = torch.full((2, 4), 3.0), torch.full((4, 2), 5.0)

    def load(request: Any) -> Any:
        made = adapter(request.lora_int_id)
        made.loras["up"].lora_a, made.loras["up"].lora_b, made.loras["up"].scaling = *theirs, 2.0
        return made

    for given in (request(path="x"), type("Own", (type(request()),), {})(lora_name="a", lora_int_id=9, lora_path="x")):
        mine = adapters.read(given, load)
        mine.loras["up"].optimize()
        assert theirs[0].eq(3).all() and theirs[1].eq(5).all()
        assert mine.loras["up"].lora_b.eq(10).all()
        theirs[1].fill_(7)
        assert mine.loras["up"].lora_b.eq(10).all()
        theirs[1].fill_(5)


def test_what_vllm_has_pinned_of_a_file_is_not_copied_again(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    made = adapter(9)
    load = lambda request: made  # noqa: E731
    load.__module__ = "vllm.lora.worker_manager"
    before = made.loras["up"].lora_a
    assert adapters.read(request(path="x"), load).loras["up"].lora_a is before
    own = type("Own", (type(request(path="x")),), {})(lora_name="a", lora_int_id=9, lora_path="x")
    assert adapters.read(own, load).loras["up"].lora_a is not before


# --- All of an update, or nothing ---------------------------------------------------------------------------------


def fail_at(manager: Any, module: str, times: int = 1) -> None:
    """Writing to a slot of `module` fails that often, half-way through the modules."""
    write = manager.modules[module].set_lora
    left = [times]

    def set_lora(index: int, lora_a: Any, lora_b: Any) -> None:
        write(index, lora_a, lora_b)
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("2 GiB")

    manager.modules[module].set_lora = set_lora


def both(number: int, value: float) -> Any:
    made = adapter(number)
    made.loras["up"].lora_a.fill_(value)
    made.loras["down"] = type(made.loras["up"])("down", 1, 1, torch.full((4,), value), torch.zeros(4))
    return made


def test_a_commit_that_fails_half_way_leaves_the_old_weights(adapters: Adapters, manager: Any) -> None:
    adapters._staged["a"] = Staged("policy", both(2, 20), None)
    assert adapters.commit("a") == 1
    adapters._staged["b"] = Staged("policy", both(2, 30), None)
    fail_at(manager, "down")
    assert adapters.commit("b") == "OutOfMemoryError: 2 GiB"
    assert [float(manager.modules[name].a_stacked[0, 0]) for name in ("up", "down")] == [20, 20]
    assert adapters.known("policy")["policy"]["version"] == 1 and adapters.broken == {}
    assert seams.registered(manager)[2].loras["up"].lora_a[0] == 20
    assert adapters._without_files[2].loras["up"].lora_a[0] == 20
    adapters._staged["c"] = Staged("policy", both(2, 30), None)
    assert adapters.commit("c") == 2 and in_slot(manager, 2) == 30


def test_a_new_adapter_that_fails_is_not_there(adapters: Adapters, manager: Any) -> None:
    adapters._staged["a"] = Staged("new", both(9, 9), None)
    fail_at(manager, "down")
    assert adapters.commit("a") == "OutOfMemoryError: 2 GiB"
    assert 9 not in seams.registered(manager) and 9 not in seams.slots(manager)
    assert adapters.known() == {} and 9 not in adapters._without_files
    free = seams.slots(manager).index(None)
    assert all(manager.modules[name].a_stacked[free].eq(0).all() for name in ("up", "down"))


def test_old_weights_that_cannot_be_put_back_are_refused(adapters: Adapters, manager: Any) -> None:
    adapters._staged["a"] = Staged("policy", both(2, 20), None)
    adapters.commit("a")
    adapters._staged["b"] = Staged("policy", both(2, 30), None)
    fail_at(manager, "down", times=2)
    assert adapters.commit("b") == "OutOfMemoryError: 2 GiB"
    assert adapters.broken == {2: "an update broke off, and OutOfMemoryError: 2 GiB"}
    assert in_slot(manager, 2) == 0


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("number", [2, 4, 9], ids=["in a slot", "in no slot", "new"])
def test_a_rank_that_could_follows_one_that_could_not(
    adapters: Adapters, manager: Any, number: int, asleep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bool] = []
    monkeypatch.setattr(seams, "true_on_all_ranks", lambda value: said.append(value))  # type: ignore[func-returns-value]
    before = dict(seams.registered(manager)), manager.modules["up"].a_stacked[:2].clone()
    if asleep:
        adapters.slept()
    stage(adapters, "policy", number, 50)
    assert adapters.commit("policy", together=True) == FOLLOWS
    if asleep:
        adapters.woke()
        adapters.put_pending()
    assert said == [True]
    assert seams.registered(manager) == before[0] and adapters.known() == {} and adapters.broken == {}
    assert torch.equal(manager.modules["up"].a_stacked[:2], before[1])
    assert number == 2 or number not in seams.slots(manager)
    for index, held in enumerate(seams.slots(manager)):
        assert manager.modules["up"].a_stacked[index, 0] == (held or 0)


def test_a_rank_without_the_staged_adapter_takes_part(adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(seams, "true_on_all_ranks", lambda value: said.append(value))  # type: ignore[func-returns-value]
    assert adapters.commit("nothing", together=True) == "KeyError: 'nothing'"
    assert said == [False]


def test_a_registry_full_of_pinned_adapters(adapters: Adapters, manager: Any) -> None:
    stage(adapters, "fifth", 5)
    adapters.commit("fifth")
    for number in seams.registered(manager):
        manager._registered_adapters.pin(number)
    before = seams.registered(manager)
    stage(adapters, "sixth", 6)
    assert "pinned" in str(adapters.commit("sixth"))
    assert seams.registered(manager) == before and "sixth" not in adapters.known()


@pytest.mark.parametrize("here", [True, False])
def test_changed_files_that_cannot_be_written(
    adapters: Adapters, manager: Any, tmp_path: Path, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this rank or on another one: all keep the old weights and refuse the adapter."""
    answers = iter([True, False])
    monkeypatch.setattr(seams, "true_on_all_ranks", lambda value: next(answers))
    monkeypatch.setattr(seams, "same_on_all_ranks", lambda value: value)
    path = folder(adapters, tmp_path / "a", 20)
    adapters._sources[2] = Source(request("policy", 2, path), ())
    new = Staged("policy", both(2, 30), Source(request("policy", 2, path), fingerprint(path)))
    monkeypatch.setattr(adapters, "_check", lambda name, request, lasting: new)
    if here:
        fail_at(manager, "down")
    adapters.read_changed()
    why = "OutOfMemoryError: 2 GiB" if here else FOLLOWS
    assert adapters.broken == {2: f"its files have changed, and {why}"} and 2 in adapters._unreadable
    assert in_slot(manager, 2) == 2 and seams.registered(manager)[2].loras["up"].lora_a[0] == 2


# --- Pairs --------------------------------------------------------------------------------------------------------


def pair(rank: int = 8, of_config: int = 8, scaling: float = 2.0, dtype: Any = torch.bfloat16, **values: Any) -> Any:
    a, b = torch.ones(rank, 6, dtype=dtype), torch.ones(5, rank, dtype=dtype)
    return SimpleNamespace(**{"lora_a": a, "lora_b": b, "rank": of_config, "scaling": scaling} | values)


def test_pairs_of_the_configs_rank() -> None:
    check = adapters_module._check_pair
    check("q_proj", pair(), None)
    check("experts", pair(rank=32), 4)
    check("experts", pair(rank=32), 0)
    check("experts.w1", pair(lora_a=torch.ones(4, 8, 6), lora_b=torch.ones(4, 5, 8)), 4)
    for rank, of_config, experts in ((8, 4, None), (8, 16, None), (24, 8, None), (32, 16, 4), (20, 8, 0)):
        with pytest.raises(ValueError, match=f"has tensors of rank {rank}, and adapter_config.json says"):
            check("q_proj", pair(rank, of_config), experts)
    with pytest.raises(ValueError, match=r"q_proj: lora_B scaled by 1e\+38 has values that are not finite"):
        check("q_proj", pair(scaling=1e38, lora_b=torch.full((5, 8), 4.0)), None)
    with pytest.raises(ValueError, match="q_proj: lora_B has values that are not finite"):
        check("q_proj", pair(lora_b=torch.full((5, 8), float("nan"))), None)
    with pytest.raises(ValueError, match="no matrices"):
        check("q_proj", pair(lora_a=torch.ones(8)), None)


# --- load_inplace -------------------------------------------------------------------------------------------------


def ask(adapters: Adapters, asked: Any, times: int = 3) -> None:
    """As the engine core does with a request, and then in a step."""
    for _ in range(times):
        if adapters.admit(asked, [asked.lora_int_id]):
            adapters._staged["again"] = adapters.worker_manager.staged(asked)
            adapters.commit("again")
        plain = seams.loaded_once(asked) if seams.is_lora_request(asked) else asked
        adapters.worker_manager._apply_adapters({plain})


def test_load_inplace_of_a_request_alone_counts_once(adapters: Adapters, manager: Any, tmp_path: Path) -> None:
    path = folder(adapters, tmp_path / "a", 40)
    flagged = request("policy", 9, path, inplace=True)
    ask(adapters, flagged)
    assert adapters.worker_manager.read == [path] and in_slot(manager, 9) == 40
    stage(adapters, "policy", 9, 50)
    adapters.commit("policy")
    ask(adapters, flagged)
    assert adapters.worker_manager.read == [path] and in_slot(manager, 9) == 50
    assert flagged.load_inplace, "it is not ours"
    other = folder(adapters, tmp_path / "b", 60)
    ask(adapters, request("policy", 9, other, inplace=True))
    assert adapters.worker_manager.read == [path, other] and in_slot(manager, 9) == 60
    third = folder(adapters, tmp_path / "c", 70)
    stage(adapters, "policy", 9, 70, third)
    adapters.commit("policy")
    ask(adapters, request("policy", 9, other, inplace=True))
    assert in_slot(manager, 9) == 70, "an update from another folder came after it"


def test_load_inplace_reads_again_what_has_changed(adapters: Adapters, manager: Any, tmp_path: Path) -> None:
    for value in (40, 41):
        path = folder(adapters, tmp_path / "a", value)
        ask(adapters, request("policy", 9, path, inplace=True))
        assert in_slot(manager, 9) == value
    assert adapters.worker_manager.read == [path, path]


def test_load_inplace_over_what_is_there_counts_once(adapters: Adapters, manager: Any, tmp_path: Path) -> None:
    ask(adapters, request("two", 2, folder(adapters, tmp_path / "a", 40), inplace=True))
    assert len(adapters.worker_manager.read) == 1 and in_slot(manager, 2) == 40


def test_load_inplace_of_add_lora_counts_each_time(adapters: Adapters, manager: Any, tmp_path: Path) -> None:
    path = folder(adapters, tmp_path / "a", 40)
    for value in (40.0, 41.0):
        folder(adapters, tmp_path / "a", value)
        adapters.worker_manager.add_adapter(request("policy", 9, path, inplace=True))
        ask(adapters, request("policy", 9, path, inplace=True))
        assert in_slot(manager, 9) == value
    assert len(adapters.worker_manager.read) == 2


def test_load_inplace_whose_files_are_gone(adapters: Adapters, manager: Any) -> None:
    ask(adapters, request("two", 2, "/nowhere", inplace=True))
    assert adapters.worker_manager.read == [] and in_slot(manager, 2) == 2


def test_frameworks_own_request_may_bring_tensors_each_time(adapters: Adapters) -> None:
    own = type("Own", (type(request()),), {})(lora_name="a", lora_int_id=9, lora_path="x", load_inplace=True)
    adapters.worker_manager.folders["x"] = 1
    for _ in range(3):
        adapters.worker_manager._apply_adapters({own})
    assert adapters.worker_manager.read == ["x"] * 3


# --- Adapters that are not there any more -------------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["tensors", "folder"])
@pytest.mark.parametrize("by", ["remove", "evict"])
def test_requests_that_run_outlive_their_adapter(
    adapters: Adapters, manager: Any, tmp_path: Path, gone: str, by: str
) -> None:
    """vLLM reads it again in the next step. New requests are refused."""
    path = folder(adapters, tmp_path / "a", 40) if gone == "folder" else None
    stage(adapters, "policy", 9, 40, path)
    adapters.commit("policy")
    running = request(path=path or "")
    assert adapters.admit(running, []) is False and adapters.held() == [9]
    if path:
        (tmp_path / "a" / "adapter_config.json").unlink()
        del adapters.worker_manager.folders[path]
    if by == "remove":
        adapters.worker_manager.remove_adapter(9)
        assert adapters.held() == []
    else:
        for number in (21, 22, 23, 24, 25):
            stage(adapters, f"other {number}", number)
            adapters.commit(f"other {number}")
    assert 9 not in seams.registered(manager)
    adapters.worker_manager._apply_adapters({running})
    assert in_slot(manager, 9) == 40, "a step has what its request was let in for"
    if by == "remove":
        with pytest.raises(Exception, match="nowhere" if path else "it came as tensors and was removed"):
            adapters.admit(running, [9])
        adapters.worker_manager._apply_adapters({running})
        assert in_slot(manager, 9) == 40


def test_a_step_reads_no_file(adapters: Adapters, manager: Any, tmp_path: Path) -> None:
    """Its requests were let in for what was read then; ranks that read again at their own moments would differ."""
    path = folder(adapters, tmp_path / "a", 40)
    running = request("policy", 9, path)
    ask(adapters, running, times=1)
    folder(adapters, tmp_path / "a", 50)
    manager.remove_adapter(9)  # as by eviction
    adapters.worker_manager._apply_adapters({running})
    assert in_slot(manager, 9) == 40 and adapters.worker_manager.read == [path]


def test_a_request_is_let_in_while_slots_are_unmapped(adapters: Adapters, manager: Any, tmp_path: Path) -> None:
    wrappers = dict(manager.modules)
    adapters.slept()
    running = request("policy", 9, folder(adapters, tmp_path / "a", 40))
    adapters.admit(running, [])
    with adapters.with_modules(), adapters.with_modules():
        assert manager.modules == wrappers
    assert manager.modules == {}
    adapters.woke()
    assert manager.modules == wrappers
    adapters.worker_manager._apply_adapters({running})
    assert in_slot(manager, 9) == 40


def test_to_let_a_request_in_changes_no_books(adapters: Adapters, manager: Any, tmp_path: Path) -> None:
    """Else a rank that cannot read the adapter would keep others than the rest, and running ones would be evicted."""
    before, slots = list(seams.registered(manager)), seams.slots(manager)
    for number in range(30, 40):
        adapters.admit(request(f"a {number}", number, folder(adapters, tmp_path / f"{number}", number)), [])
        with pytest.raises(FileNotFoundError):
            adapters.admit(request("b", 50, "/nowhere"), [])
        assert list(seams.registered(manager)) == before and seams.slots(manager) == slots
    assert adapters.held() == [], "those that nobody waits for are let go"


@pytest.mark.parametrize("by", ["add_lora", "a request"])
def test_another_adapter_under_the_id_of_one_that_was_removed(
    adapters: Adapters, manager: Any, tmp_path: Path, by: str
) -> None:
    """Though a request of the removed one runs on, which has brought it back."""
    stage(adapters, "policy", 9, 40)
    adapters.commit("policy")
    old = request("policy", 9)
    adapters.admit(old, [])
    adapters.worker_manager.remove_adapter(9)
    adapters.worker_manager._apply_adapters({old})
    assert in_slot(manager, 9) == 40
    new = request("other", 9, folder(adapters, tmp_path / "a", 60))
    if by == "add_lora":
        adapters.worker_manager.add_adapter(new)
    ask(adapters, new)
    assert in_slot(manager, 9) == 60 and adapters.held() == [9]


def test_load_inplace_counts_when_it_was_read(adapters: Adapters, manager: Any, tmp_path: Path) -> None:
    adapters.worker_manager.add_adapter(request("policy", 9, folder(adapters, tmp_path / "a", 40)))
    other = request("policy", 9, folder(adapters, tmp_path / "b", 50), inplace=True)
    assert adapters.admit(other, []), "it is to be read, and that may fail"
    ask(adapters, other)
    assert in_slot(manager, 9) == 50


def test_adapters_that_leave_do_not_pile_up(adapters: Adapters, manager: Any) -> None:
    for number in range(100, 150):
        stage(adapters, f"step {number}", number)
        adapters.commit(f"step {number}")
        adapters.admit(request(f"step {number}", number), [])
        adapters.worker_manager.remove_adapter(number)
    assert len(adapters._held) <= manager.capacity + 1
    assert adapters._without_files == {} and adapters._homes == {} and adapters.numbers == {}


def test_a_request_with_tensors_of_its_own_is_not_answered_from_what_was(adapters: Adapters, manager: Any) -> None:
    stage(adapters, "policy", 9, 40)
    adapters.commit("policy")
    own = type("Own", (type(request()),), {})(lora_name="policy", lora_int_id=9, lora_path="dummy")
    adapters.worker_manager.folders["dummy"] = 70
    for by in (adapters.worker_manager.remove_adapter, manager.remove_adapter):
        by(9)
        adapters.worker_manager.add_adapter(own)
        assert seams.registered(manager)[9].loras["up"].lora_a[0] == 70
    assert 9 not in adapters._without_files


def test_an_adapter_that_was_updated_from_a_folder_is_read_from_there(
    adapters: Adapters, manager: Any, tmp_path: Path
) -> None:
    """Also by requests that know its old one."""
    old, new = folder(adapters, tmp_path / "old", 40), folder(adapters, tmp_path / "new", 50)
    ask(adapters, request("policy", 9, old), times=1)
    stage(adapters, "policy", 9, 50, new)
    adapters.commit("policy")
    manager.remove_adapter(9)  # as by eviction
    ask(adapters, request("policy", 9, old), times=1)
    assert in_slot(manager, 9) == 50
    adapters.worker_manager.remove_adapter(9)
    ask(adapters, request("policy", 9, old), times=1)
    assert in_slot(manager, 9) == 40, "the user has removed it, and it means its files again"


# --- Names --------------------------------------------------------------------------------------------------------


def test_versions_of_a_name_never_come_again(adapters: Adapters) -> None:
    versions = []
    for number in (9, 9, 7, 8):
        stage(adapters, "policy", number)
        versions.append(adapters.commit("policy"))
        if len(versions) > 1:
            adapters.worker_manager.remove_adapter(number)
    assert versions == [1, 2, 3, 4]


def test_a_name_for_each_of_many_steps_leaves_nothing_behind(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed, or thrown out by vLLM; the ids are not given again."""
    monkeypatch.setattr(adapters_module, "_MOST_NAMES", 50)
    path = folder(adapters, tmp_path / "a", 1)
    for step in range(200):
        number = adapters.free_number()
        assert number == 1_000_000 + step
        if step % 2:
            stage(adapters, f"step {step}", number)
            adapters.commit(f"step {step}")
            adapters.worker_manager.remove_adapter(number)
        else:
            adapters.worker_manager.add_adapter(request(f"step {step}", number, path, inplace=True))
    for name, table in vars(adapters).items():
        if isinstance(table, (dict, set)):
            assert len(table) <= 50, name


def test_known_of_one_name(adapters: Adapters) -> None:
    for name, number in (("a", 5), ("b", 6)):
        stage(adapters, name, number)
        adapters.commit(name)
    assert adapters.known("a") == {"a": {"lora_int_id": 5, "version": 1}}
    assert adapters.known("c") == {} and set(adapters.known()) == {"a", "b"}


# --- Paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", None])
def test_a_request_with_tensors_and_no_path(
    adapters: Adapters, path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current directory may be an adapter's."""
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    given = type("Own", (type(request()),), {})(lora_name="a", lora_int_id=9, lora_path="x")
    given.lora_path = path
    adapters.read(given, lambda request: adapter(9))
    assert adapters._sources == {}


def test_a_relative_path_means_where_it_was_read(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(adapters, tmp_path / "a", 1)
    monkeypatch.chdir(tmp_path)
    adapters.read(request("two", 2, "a"), lambda request: adapter(2))
    monkeypatch.chdir("/")
    assert not adapters._files_changed(2)
    (tmp_path / "a" / "adapter_config.json").write_text("other")
    assert adapters._files_changed(2) and adapters._sources[2].request.lora_path == path
