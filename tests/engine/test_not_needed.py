"""Engines that do not need the package: with it installed and on, they are what they are without it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.stock import PACKAGE, PROMPTS, look

pytestmark = pytest.mark.engine

# The engine with LoRA runs between the first two, in the same process.
WITHOUT_LORA = ("off", "off again", "other class")
LIFE = ("calls, base, 4 tokens", "calls, base, 16 tokens", "calls, cycle")


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, Any]]:
    """What processes with and without the package saw, by ``VLLM_PLUGINS``."""
    with ThreadPoolExecutor(2) as both:
        return dict(zip(("lora_reload", "none"), both.map(look, ("lora_reload", "none")), strict=True))


def test_the_look_is_a_close_one(seen: dict[str, dict[str, Any]]) -> None:
    """Control: what the other tests look for is found in an engine with LoRA and the package."""
    assert seen["none"]["modules"] == seen["none"]["altered"] == []
    assert PACKAGE in seen["lora_reload"]["modules"]
    on = seen["lora_reload"]["on"]
    assert {"base_view.py", "client.py", "coverage.py", "runner.py", "session.py"} <= files(on["calls, cycle"])
    assert "coverage.py" in files(on["calls, start"])
    for part in ("LLMEngine", "worker", "runner"):
        assert any(name.startswith(PACKAGE) for name in on["parts"][part]["classes"])
        assert not on["parts"][part]["is the class of that name"]
    assert "load_weights" in on["parts"]["model."]["attributes"]
    assert len(on["parts"]) > 40


@pytest.mark.parametrize("engine", WITHOUT_LORA)
def test_lora_off_same_parts(seen: dict[str, dict[str, Any]], engine: str) -> None:
    """Classes, methods and attributes of every part, from the front end to the last submodule of the model."""
    ours, stock = seen["lora_reload"][engine]["parts"], seen["none"][engine]["parts"]
    assert ours.keys() == stock.keys()
    assert len(ours) > 30
    for name, part in ours.items():
        # Constructors are how the package learns of an engine.
        assert without(part["methods"], "__init__") == without(stock[name]["methods"], "__init__"), name
        assert without(part, "methods") == without(stock[name], "methods"), name


@pytest.mark.parametrize("engine", WITHOUT_LORA)
def test_lora_off_none_of_the_package_runs(seen: dict[str, dict[str, Any]], engine: str) -> None:
    """Not in requests, sleep, wake-up or reload."""
    assert [seen["lora_reload"][engine][calls] for calls in LIFE] == [{}, {}, {}]


@pytest.mark.parametrize("engine", ["off again", "other class"])
def test_lora_off_load_is_not_watched(seen: dict[str, dict[str, Any]], engine: str) -> None:
    """At the start of an engine only the hooks run that find that LoRA is off."""
    assert files(seen["lora_reload"][engine]["calls, start"]) == {"plugin.py", "seams.py"}


@pytest.mark.parametrize("engine", WITHOUT_LORA)
def test_lora_off_same_answers(seen: dict[str, dict[str, Any]], engine: str) -> None:
    ours, stock = seen["lora_reload"][engine], seen["none"][engine]
    assert ours["answers"] == ours["answers after the cycle"] == stock["answers"] == stock["answers after the cycle"]
    assert len({tuple(answer) for answer in ours["answers"]["base"]}) == len(PROMPTS)


def test_lora_on_same_answers(seen: dict[str, dict[str, Any]]) -> None:
    ours, stock = seen["lora_reload"]["on"]["answers"], seen["none"]["on"]["answers"]
    assert ours == stock
    assert ours["base"] == seen["none"]["off"]["answers"]["base"] != ours["adapter"]


@pytest.mark.parametrize("who", ["base", "adapter"])
def test_lora_on_a_step_takes_a_look(seen: dict[str, dict[str, Any]], who: str) -> None:
    """The engine core compares its counters; it asks no worker, which notes that a step has begun."""
    few, many = (seen["lora_reload"]["on"][f"calls, {who}, {tokens} tokens"] for tokens in (4, 16))
    assert files(many) <= {"adapters.py", "client.py", "door.py", "prefixes.py", "seams.py"}
    assert many["door.py:admit"] == many["client.py:mark"] == len(PROMPTS)
    more = {name: many[name] - few[name] for name in many if many[name] != few[name]}
    steps = 16 - 4
    assert more["door.py:before_step"] == steps and sum(more.values()) <= 20 * steps
    assert "door.py:_ask" not in many


def test_nothing_of_the_package_is_left_in_vllm(seen: dict[str, dict[str, Any]]) -> None:
    """After engines with and without LoRA, only constructors are hooked, and no import is waited for.

    A core that is a process of its own loads plugins within its constructor, so it is met once more before its loop.
    """
    altered = seen["lora_reload"]["altered"]
    assert altered and all(name.endswith((".__init__", "EngineCoreProc.run_busy_loop")) for name in altered)
    assert seen["lora_reload"]["finders"] == seen["none"]["finders"]


def files(calls: dict[str, int]) -> set[str]:
    return {name.partition(":")[0] for name in calls}


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}
