"""The package's promises as a state machine over an engine in this process: any order of calls, and what each does.

The model (`Machine`) knows which base weights are in memory, what sleeps, and which weights each adapter has. From that
it says what a request gets: exactly these tokens, or which error. After every load it says what stands in memory, byte
for byte. Where two outcomes keep the promise, both are allowed; wrong tokens, another error or an engine that no
longer answers never are.

Hundreds of cycles, for as long as one has time:

    make test PYTEST_ARGS="-m slow -k soak -s tests/engine/test_promises.py"
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from vllm.config.weight_transfer import WeightTransferConfig

from tests.matrix.transfer import InProcessEngine
from tests.support.engine import Engine
from tests.support.promises import BASES, ENGINE, NAMES, NOTHING, PROMPT, TOKENS, WEIGHTS, Dice, Versions, of_pool
from vllm_lora_reload import AdapterMissingError, AsleepError, LoRAReloadError, WeightsMissingError, update_adapter

pytestmark = pytest.mark.engine

STEPS = 1200
SOAK_CYCLES = 300
BUCKET = 5  # tensors a call
FREE_SLOTS = ENGINE["max_loras"] - 2  # two can be pinned
QUEUED = "queued"  # not answered yet: an engine that sleeps at level 1 answers when it is awake
Outcome = tuple[int, ...] | type[LoRAReloadError] | Literal["queued"]
Tokens = dict[tuple[str, int | None], tuple[int, ...]]


class World:
    """An engine, and what is right: tokens for each base and adapter weights, bytes of each base and in a slot."""

    def __init__(self, folder: Path) -> None:
        self.engine = Engine(folder, **ENGINE)
        self.llm, self.front = self.engine.llm, self.engine.llm.llm_engine
        self.worker, self.model = self.engine.worker, self.engine.model
        self.manager = self.worker.lora_reload.adapters.manager
        self.versions = Versions(folder, self.engine.checkpoint)
        self.folder = folder
        self.worker.weight_transfer_engine = InProcessEngine(
            WeightTransferConfig(), self.worker.vllm_config, self.worker.device, self.model
        )
        self._requests = 0
        self._answers: dict[str, tuple[int, ...]] = {}
        reference = self.update("reference", self.versions.tensors[1])
        nothing = self.update(NOTHING, self.versions.nothing)
        self.front.pin_lora(nothing.lora_int_id)
        assert self.slots()[-1] == nothing.lora_int_id
        for number in {*self.front.list_loras()} - {reference.lora_int_id, nothing.lora_int_id}:
            self.front.remove_lora(number)
        self.tokens: Tokens = {}
        self.in_slot: dict[int, str] = {0: self.slot_digest(self.slots().index(nothing.lora_int_id))}
        self.base_digests: dict[str, dict[str, str]] = {}
        for base in BASES:
            self.engine.reload(weights_iterator=iter(self.versions.bases[base].items()))
            self.front.reset_prefix_cache()
            self.base_digests[base] = self.digests(of_base=True)
            self.tokens[base, None] = self._right(None)
            assert self._right(nothing) == self.tokens[base, None]
            for weights in WEIGHTS:
                self.update("reference", self.versions.tensors[weights])
                self.tokens[base, weights] = self._right(reference)
                self.in_slot[weights] = self.slot_digest(self.slots().index(reference.lora_int_id))
        assert len(set(self.tokens.values())) == len(self.tokens) and len(set(self.in_slot.values())) == 5
        self.front.remove_lora(reference.lora_int_id)
        self.home()
        self.nothing = nothing

    def home(self) -> None:
        self.engine.reload(weights_path=str(self.versions.checkpoints["A"]))
        self.front.reset_prefix_cache()

    def update(self, name: str, tensors: dict[str, torch.Tensor]) -> Any:
        """The adapter's ``LoRARequest``."""
        return update_adapter(self.llm, name, tensors, self.versions.config).lora_request

    def _right(self, request: Any) -> tuple[int, ...]:
        outcome = self.ask(request)
        assert isinstance(outcome, tuple) and len(outcome) == TOKENS
        return outcome

    def ask(self, request: Any) -> Outcome:
        """One request, from the door to its last token. As ``LLM.generate``, but it does not wait for ever."""
        return self.finish(number) if isinstance(number := self.send(request), str) else number

    def send(self, request: Any) -> str | type[LoRAReloadError]:
        from vllm import SamplingParams

        self._requests += 1
        greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        try:
            self.front.add_request(f"r{self._requests}", PROMPT, greedy, lora_request=request)
        except LoRAReloadError as error:
            return _kind(error)
        return f"r{self._requests}"

    def finish(self, number: str) -> Outcome:
        for _ in range(4 * TOKENS):
            if number in self._answers:
                return self._answers.pop(number)
            try:
                outputs = self.front.step()
            except LoRAReloadError as error:  # it waited for a while, and cannot be answered now
                return _kind(error)
            for output in outputs:
                if output.finished:
                    self._answers[output.request_id.partition("-")[0]] = tuple(output.outputs[0].token_ids)
        return "queued"

    def slots(self) -> list[int | None]:
        return list(self.manager.lora_index_to_id)

    def slot_digest(self, index: int) -> str:
        """Of all bytes that one slot has, in every wrapper."""
        whole = hashlib.sha256()
        for _, module in sorted(self.model.named_modules()):
            for attribute in ("lora_a_stacked", "lora_b_stacked"):
                stacks = getattr(module, attribute, ())
                for stack in stacks if isinstance(stacks, tuple) else (stacks,):
                    whole.update(stack[index].contiguous().view(torch.uint8).numpy().tobytes())
        return whole.hexdigest()

    def digests(self, of_base: bool) -> dict[str, str]:
        """Of pool tensors outside the slots: the base model's, or punica's, which are those of the last batch."""
        return of_pool(self.worker.pool_digests(), of_base)


def _kind(error: LoRAReloadError) -> type[LoRAReloadError]:
    return next(kind for kind in (WeightsMissingError, AdapterMissingError) if isinstance(error, kind))


@dataclass
class Adapter:
    """What the model knows of one. `folder`: where its files are, if it came from files and they are still there."""

    number: int
    weights: int
    request: Any
    from_files: bool
    folder: Path | None = None
    changed: int | None = None  # what its files say since they were changed; read at the next wake-up


@dataclass
class Session:
    """A weight transfer that is open. `over`: a sleep came between; it is the trainer's turn to notice."""

    base: str
    rest: list[tuple[str, torch.Tensor]]
    over: bool = False


@dataclass
class Machine:
    """Attributes:
    base: what the base weights may be: one of `BASES`, or None where they are missing and requests are refused.
    path: what ``reload_weights()`` loads; vLLM remembers the last ``weights_path``.
    level: of the sleep, 0 if awake. `asleep` has the tags that sleep.
    waiting: requests that came during level 1, with who answers.
    gone: requests for adapters that were removed; somebody may still have them.
    """

    world: World
    dice: Dice
    base: set[str | None] = field(default_factory=lambda: {"A"})
    path: str = "A"
    level: int = 0
    asleep: set[str] = field(default_factory=set)
    adapters: dict[str, Adapter] = field(default_factory=dict)
    pinned: str | None = None
    session: Session | None = None
    waiting: list[tuple[str, str | None]] = field(default_factory=list)
    gone: list[Adapter] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(10, 1_000_000)))
    before: tuple[Any, ...] | None = None
    cycles: int = 0
    exact: int = 0

    # --- What the package promises -------------------------------------------------------------------------------

    def allowed(self, name: str | None) -> set[Outcome]:
        """What a request for an adapter, or for the base model, may get now."""
        if "weights" in self.asleep and self.level == 2:
            return {WeightsMissingError}
        if self.asleep and self.level == 1 and self.base != {None}:
            return {QUEUED, WeightsMissingError}
        if self.asleep:
            return {WeightsMissingError}
        outcomes: set[Outcome] = {WeightsMissingError} if None in self.base or self.session else set()
        adapter = self.adapters[name] if name else None
        for base in self.base - {None}:
            outcomes.add(self.world.tokens[base, adapter.weights if adapter else None])  # type: ignore[index]
        if adapter and adapter.from_files and adapter.folder is None:
            outcomes.add(AdapterMissingError)  # if it was evicted from host memory
        return outcomes

    def loaded(self, base: str) -> None:
        """A load has brought all base weights, and ends whatever session was open."""
        self.base, self.session = {base}, None
        self.world.front.reset_prefix_cache()
        self.check_memory()

    def check_memory(self) -> None:
        """Every byte of the pool is what it should be."""
        (base,) = self.base
        assert self.world.digests(of_base=True) == self.world.base_digests[base]  # type: ignore[index]
        slots = self.world.slots()
        weights = {each.number: each.weights for each in self.adapters.values()} | {self.world.nothing.lora_int_id: 0}
        for index, number in enumerate(slots):
            if number is not None:
                assert self.world.slot_digest(index) == self.world.in_slot[weights[number]], f"slot {index} of {slots}"
        assert (
            self.world.worker.meta_tensors() == [] and self.world.worker.wrapper_names() == self.world.engine.wrappers
        )
        if self.before is not None and not self.asleep:
            slots_before, rest_before = self.before
            assert slots == slots_before, "the same slots"
            assert self.world.digests(of_base=False) == rest_before
            self.before = None

    def check_books(self) -> None:
        """At any time: pinned adapters have their slots, no adapter has two, status and model agree."""
        slots = [number for number in self.world.slots() if number is not None]
        assert len(slots) == len(set(slots)) and self.world.nothing.lora_int_id in slots
        assert self.pinned is None or self.adapters[self.pinned].number in slots

    # --- Requests ------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        name = self.dice.random.choice([None, *self.adapters, *self.adapters])
        wait = {who for _, who in self.waiting if who} | ({name} if name else set())
        if len(wait) > FREE_SLOTS:  # vLLM would batch them, though pinned adapters leave no slots for all
            return
        self.dice.note(f"ask({name})")
        self.asked(name, self.allowed(name))

    def asked(self, name: str | None, allowed: set[Outcome]) -> None:
        self.before = None
        number = self.world.send(self.adapters[name].request if name else None)
        outcome = self.world.finish(number) if isinstance(number, str) else number
        assert outcome in allowed, f"{name}: {outcome}, not one of {allowed}"
        self.exact += len(allowed) == 1
        if outcome == QUEUED:
            assert isinstance(number, str)
            self.waiting.append((number, name))
        elif outcome is WeightsMissingError and not self.asleep and not self.session:
            self.base = {None}
        elif isinstance(outcome, tuple) and len(self.base) > 1:
            self.base = {base for base in self.base if base and outcome in self.world.tokens.values()}

    def ask_for_one_that_is_gone(self) -> None:
        """A request that somebody kept: never another adapter's answer, never the base model's, never the end."""
        adapter = self.dice.random.choice(self.really_gone())
        self.dice.note(f"ask for removed {adapter.request.lora_name} {adapter.number}")
        allowed: set[Outcome] = {AdapterMissingError}
        if adapter.folder is not None:  # vLLM reads it again
            allowed |= {self.world.tokens[base, adapter.weights] for base in self.base if base}
        if None in self.base or self.session or self.asleep:
            allowed.add(WeightsMissingError)
        self.before = None
        outcome = self.world.ask(adapter.request)
        assert outcome in allowed, f"{adapter.request}: {outcome}, not one of {allowed}"
        if isinstance(outcome, tuple):
            self.world.front.remove_lora(adapter.number)

    def really_gone(self) -> list[Adapter]:
        """Ids can come back with their names. A name that has another id by now would have two with these files."""
        there = {each.number for each in self.adapters.values()}
        return [
            each
            for each in self.gone
            if each.number not in there and not (each.folder and each.request.lora_name in self.adapters)
        ]

    # --- Sleep and wake-up -----------------------------------------------------------------------------------------

    def sleep(self) -> None:
        level = self.dice.random.choice((1, 2, 2))
        self.dice.note(f"sleep({level})")
        self.before = (self.world.slots(), self.world.digests(of_base=False)) if self.base <= {*BASES} else None
        self.world.llm.sleep(level=level)
        self.level, self.asleep = level, {"weights", "kv_cache"}
        if level == 2:
            self.base = {None}
        if self.session:
            self.base.add(None)
            self.session.over = True

    def wake(self) -> None:
        tags = self.dice.random.choice((None, ["weights"], ["kv_cache"]))
        self.dice.note(f"wake_up({tags})")
        weights_slept = "weights" in self.asleep
        self.world.llm.wake_up(tags)
        self.asleep -= set(tags or self.asleep)
        if weights_slept and "weights" not in self.asleep:
            for adapter in self.adapters.values():
                if adapter.changed is not None:
                    self.before = None if adapter.changed != adapter.weights else self.before
                    adapter.weights, adapter.changed = adapter.changed, None
        if not self.asleep:
            self.level = 0
            self.cycles += 1
            waiting, self.waiting = self.waiting, []
            for number, name in waiting:
                outcome = self.world.finish(number)
                assert outcome in self.allowed(name), f"{name}, asked during sleep: {outcome}"
                self.before = None

    # --- Base weights ----------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Every way in, at any time. Asleep, it is refused."""
        ways: dict[str, Callable[[str], None]] = {
            "disk": lambda base: self.world.engine.reload(weights_path=str(self.world.versions.checkpoints[base])),
            "iterator": lambda base: self.world.engine.reload(weights_iterator=iter(self.tensors(base))),
            "path of the last": lambda base: self.world.engine.reload(),
        }
        if self.session is None:
            ways |= {"buckets": self.load_buckets, "transfer": self.load_by_transfer}
        way = self.dice.random.choice(sorted(ways))
        base = self.path if way == "path of the last" else self.dice.random.choice(BASES)
        self.dice.note(f"load({way}, {base})")
        if "weights" in self.asleep:
            with pytest.raises(AsleepError):
                ways[way](base)
            return
        ways[way](base)
        self.loaded(base)
        self.path = base if way == "disk" else self.path

    def tensors(self, base: str) -> list[tuple[str, torch.Tensor]]:
        return list(self.world.versions.bases[base].items())

    def load_buckets(self, base: str) -> None:
        """As verl and TRL do."""
        pairs = self.tensors(base)
        for start in range(0, len(pairs), BUCKET):
            self.world.model.load_weights(iter(pairs[start : start + BUCKET]))

    def load_by_transfer(self, base: str) -> None:
        rpc, pairs = self.world.llm.collective_rpc, self.tensors(base)
        rpc("start_weight_update")
        for start in range(0, len(pairs), BUCKET):
            rpc("update_weights", args=({"weights": pairs[start : start + BUCKET]},))
        rpc("finish_weight_update")

    def load_a_part(self) -> None:
        """One bucket of many brings nothing back."""
        self.dice.note("load_weights(first bucket)")
        self.world.model.load_weights(iter(self.tensors("A")[:BUCKET]))

    def load_that_breaks_off(self) -> None:
        self.dice.note("reload_weights(iterator that breaks off)")

        def broken() -> Iterator[tuple[str, torch.Tensor]]:
            yield from self.tensors("B")[: 2 * BUCKET]
            raise OSError("the trainer went away")

        with pytest.raises(OSError, match="the trainer went away"):
            self.world.engine.reload(weights_iterator=broken())
        self.base, self.session = {None}, None

    def start_session(self) -> None:
        base = self.dice.random.choice(BASES)
        self.dice.note(f"start_weight_update() for {base}")
        self.world.llm.collective_rpc("start_weight_update")
        self.session = Session(base, self.tensors(base))

    def go_on_with_session(self) -> None:
        """One more chunk, or the end. After a sleep it may be refused; what was sent is then as good as nothing."""
        assert self.session
        session, last = self.session, not self.session.rest
        count = self.dice.random.choice((BUCKET, len(session.rest)))
        self.dice.note(f"{'finish_weight_update()' if last else f'update_weights({count})'}{' late' * session.over}")
        self.before = None
        rpc, chunk = self.world.llm.collective_rpc, session.rest[:count]
        session.rest = session.rest[count:]
        try:
            rpc("finish_weight_update") if last else rpc("update_weights", args=({"weights": chunk},))
        except Exception as error:
            if not session.over:
                raise
            self.dice.note(f"  {type(error).__name__}")
            self.base, self.session = {*self.base, None}, None
            return
        if session.over:
            self.base = {*self.base, None}
            self.session = None if last else session
        elif last:
            self.loaded(session.base)
        else:
            self.base = {None}

    # --- Adapters --------------------------------------------------------------------------------------------------

    def update(self) -> None:
        name, weights = self.dice.random.choice(NAMES), self.dice.random.choice(WEIGHTS)
        folder = self.new_files(name, weights) if self.dice.random.random() < 0.3 else None
        self.dice.note(f"update_adapter({name}, weights {weights}{', path' if folder else ''})")
        self.before = None
        if folder:
            request = update_adapter(self.world.llm, name, path=folder).lora_request
        else:
            request = self.world.update(name, self.world.versions.tensors[weights])
        known = self.adapters.get(name)
        assert known is None or known.number == request.lora_int_id, "a name keeps its id"
        self.adapters[name] = Adapter(request.lora_int_id, weights, request, folder is not None, folder)

    def new_files(self, name: str, weights: int) -> Path:
        folder = self.world.folder / f"{name}-{next(self.numbers)}"
        shutil.copytree(self.world.versions.folders[weights], folder)
        return folder

    def add(self) -> None:
        """From files, under an id that no adapter had."""
        from vllm.lora.request import LoRARequest

        name = self.dice.random.choice([name for name in NAMES if name not in self.adapters])
        weights, number = self.dice.random.choice(WEIGHTS), next(self.numbers)
        folder = self.new_files(name, weights)
        self.dice.note(f"add_lora({name}, {number}, weights {weights})")
        self.before = None
        request = LoRARequest(name, number, str(folder))
        assert self.world.front.add_lora(request)
        self.adapters[name] = Adapter(number, weights, request, from_files=True, folder=folder)

    def remove(self) -> None:
        name = self.dice.random.choice(sorted(self.adapters))
        if any(name == who for _, who in self.waiting):
            return
        self.dice.note(f"remove_lora({name})")
        self.before = None
        adapter = self.adapters.pop(name)
        self.world.front.remove_lora(adapter.number)
        self.pinned = None if self.pinned == name else self.pinned
        if adapter.changed is not None:
            adapter.weights = adapter.changed
        self.gone = [*self.gone[-5:], adapter]

    def pin(self) -> None:
        registered = self.world.front.list_loras()
        if names := [name for name, adapter in self.adapters.items() if adapter.number in registered]:
            self.pinned = self.dice.random.choice(names)
            self.dice.note(f"pin_lora({self.pinned})")
            self.before = None
            assert self.world.front.pin_lora(self.adapters[self.pinned].number)

    def change_files(self) -> None:
        """While it sleeps: what serves after the wake-up is what the files say then."""
        from_files = [each for each in self.adapters.values() if each.from_files and each.folder]
        if from_files:
            adapter, weights = self.dice.random.choice(from_files), self.dice.random.choice(WEIGHTS)
            self.dice.note(f"files of {adapter.request.lora_name} become weights {weights}")
            assert adapter.folder
            new = adapter.folder.with_name("new")
            shutil.copytree(self.world.versions.folders[weights], new)
            shutil.rmtree(adapter.folder)
            new.rename(adapter.folder)
            adapter.changed = weights

    def delete_files(self) -> None:
        """What is in memory goes on serving."""
        from_files = [each for each in self.adapters.values() if each.folder and each.changed is None]
        if from_files:
            adapter = self.dice.random.choice(from_files)
            self.dice.note(f"files of {adapter.request.lora_name} are deleted")
            assert adapter.folder
            shutil.rmtree(adapter.folder)
            adapter.folder = None

    # --- Control calls ---------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Calls that only read change nothing, and say what is so."""
        self.dice.note("lora_reload_status, list_loras")
        (status,) = self.world.llm.collective_rpc("lora_reload_status")
        if self.asleep & {"weights"}:
            assert status["state"] == ("offloaded" if self.level == 1 else "discarded")
        elif self.base == {None} and self.session is None:
            assert status["state"] == "missing" and status["error"]
        elif None not in self.base and self.session is None:
            there = {str(each.number) for each in self.adapters.values() if each.folder or not each.from_files}
            assert status["state"] == "complete" and not there & status["adapters"].keys()
        assert self.world.nothing.lora_int_id in self.world.front.list_loras()

    # --- The run ---------------------------------------------------------------------------------------------------

    def possible(self) -> dict[Callable[[], None], int]:
        """What can be done next, and how often it is."""
        awake, mapped = not self.asleep, "weights" not in self.asleep
        missing = mapped and self.base == {None}
        rules: dict[Callable[[], None], tuple[int, bool]] = {
            self.ask: (10, True),
            self.ask_for_one_that_is_gone: (2, awake and bool(self.really_gone())),
            self.sleep: (3, awake),
            self.wake: (10, not awake),
            self.load: (8 if missing else 1, True),
            self.load_a_part: (1, missing and self.session is None),
            self.load_that_breaks_off: (1, mapped and not self.waiting),
            self.start_session: (2, awake and self.session is None),
            self.go_on_with_session: (8, mapped and self.session is not None and not self.waiting),
            self.update: (3, True),
            self.add: (3, len(self.adapters) < len(NAMES)),
            self.remove: (2, bool(self.adapters)),
            self.pin: (1, self.pinned is None),
            self.change_files: (2, not mapped),
            self.delete_files: (1, True),
            self.look: (2, True),
        }
        return {rule: weight for rule, (weight, now) in rules.items() if now}

    def step(self) -> None:
        rules = self.possible()
        self.dice.random.choices(list(rules), list(rules.values()))[0]()
        self.check_books()

    def end(self) -> None:
        """All is awake, loaded and right, whatever happened before; then nothing is left."""
        self.world.llm.wake_up()
        self.asleep, self.level, self.waiting = set(), 0, []
        for adapter in self.adapters.values():
            adapter.weights, adapter.changed = adapter.changed or adapter.weights, None
        self.before = None
        self.world.home()
        self.loaded("A")
        for name in (None, *self.adapters):
            self.asked(name, self.allowed(name))
        for adapter in self.adapters.values():
            self.world.front.remove_lora(adapter.number)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "synchronize", lambda *args: None)  # weight transfer calls it
        yield World(tmp_path_factory.mktemp("promises"))


def run(world: World, dice: Dice, cycles: int = 0) -> Machine:
    """At least so many steps, and so many cycles of sleep."""
    machine = Machine(world, dice)
    with dice.shown():
        while len(dice.taken) < dice.steps or machine.cycles < cycles:
            machine.step()
        machine.end()
    return machine


def test_any_order(world: World) -> None:
    machine = run(world, Dice(STEPS))
    assert machine.cycles > machine.dice.steps // 50 and machine.exact > machine.dice.steps // 10


@pytest.mark.slow
def test_soak(world: World) -> None:
    """300 cycles; see the heading of this file."""
    run(world, Dice(0), cycles=SOAK_CYCLES)
