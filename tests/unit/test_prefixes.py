"""Which salts an adapter's requests get: one that was never used before, whenever the weights may be others."""

from typing import Any

import pytest

from vllm_lora_reload import prefixes as prefixes_module
from vllm_lora_reload import seams
from vllm_lora_reload.prefixes import Prefixes


def request(name: str = "policy", number: int = 1, path: str = "/a", inplace: bool = False) -> Any:
    made = seams.lora_request(name, number, path)
    made.load_inplace = inplace
    return made


def test_a_name_with_one_set_of_weights_has_none() -> None:
    prefixes = Prefixes()
    prefixes.added(request())
    assert [prefixes.salt(request()) for _ in range(3)] == [""] * 3


def test_update_remove_add_update() -> None:
    """The id changes, and vLLM's block hash knows the adapter by name."""
    prefixes, salts = Prefixes(), []
    for number, path in ((1_000_000, "lora_reload:policy"), (7, "/any"), (7, "lora_reload:policy")):
        if path == "/any":
            prefixes.removed(1_000_000)
            prefixes.added(request(number=number, path=path))
        else:
            prefixes.updated(request(number=number, path=path))
        salts.append(prefixes.salt(request(number=number, path=path)))
    assert len(set(salts)) == 3 and "" not in salts


@pytest.mark.parametrize("other", [request(number=2), request(path="/b"), request(inplace=True)])
def test_weights_from_elsewhere(other: Any) -> None:
    """By ``add_lora``, or by a request alone."""
    for add in (True, False):
        prefixes = Prefixes()
        assert prefixes.salt(request()) == ""
        if add:
            prefixes.added(other)
        salt = prefixes.salt(other)
        assert salt and prefixes.salt(other) == salt


def test_removed_and_added_again_under_the_same_id() -> None:
    prefixes = Prefixes()
    prefixes.added(request())
    salts = {""}
    for _ in range(3):
        prefixes.removed(1)
        prefixes.added(request())
        salts.add(prefixes.salt(request()))
    assert len(salts) == 4


def test_load_inplace_by_add_lora_counts_each_time() -> None:
    prefixes, salts = Prefixes(), set()
    for _ in range(3):
        prefixes.added(request(inplace=True))
        salts |= {prefixes.salt(request()), prefixes.salt(request(inplace=True))}
    assert len(salts) == 3


def test_frameworks_own_request_with_load_inplace_may_bring_tensors_each_time() -> None:
    class WithTensors(type(request())):  # type: ignore[misc]
        """As frameworks make them."""

    prefixes = Prefixes()
    own = WithTensors(lora_name="policy", lora_int_id=1, lora_path="/a", load_inplace=True)
    assert len({prefixes.salt(own) for _ in range(3)}) == 3


def test_after_an_update_it_does_not_matter_where_requests_point() -> None:
    prefixes = Prefixes()
    prefixes.updated(request(path="lora_reload:policy"))
    assert prefixes.salt(request(path="/old")) == prefixes.salt(request(path="lora_reload:policy")) != ""


def test_others_keep_theirs() -> None:
    prefixes = Prefixes()
    prefixes.added(request("other", 2))
    prefixes.updated(request())
    prefixes.removed(1)
    assert prefixes.salt(request("other", 2)) == ""


def test_names_that_are_forgotten_get_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes_module, "_MOST", 10)
    prefixes = Prefixes()
    first = prefixes.salt(request("step 0", 1))
    for step in range(1, 100):
        prefixes.added(request(f"step {step}", 1 + step))
    assert len(prefixes._names) == 10
    assert prefixes.salt(request("step 0", 1)) != first
    unseen = Prefixes()
    unseen.removed(5)  # another front end may have used it, under any name
    assert unseen.salt(request()) != ""
