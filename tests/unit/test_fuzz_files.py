"""Files a little other than they should be: what is taken is what the safetensors library takes, byte for byte."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from tests.support.odd_files import in_time
from vllm_lora_reload import SnapshotError
from vllm_lora_reload.replay import Checkpoint, NoReplay
from vllm_lora_reload.snapshot import Engine, Manifest, Snapshot, digests_of, storages, write
from vllm_lora_reload.tensors import SAFETENSORS_DTYPES

fuzz = settings(
    max_examples=300, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-40, 40),
    st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1, 2**64, 10**30, -(2**63)]),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["F32", "F4", "F8_E4M3", "\ud800", "a\0", "../x", "/dev/null"]),
    st.lists(st.integers(-3, 40), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=2),
)


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A header as the library writes it, and bytes of tensors."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}} if draw(st.booleans()) else {}
    offset = 0
    for name in draw(st.lists(st.text(min_size=1, max_size=3), max_size=4, unique=True)):
        dtype = draw(st.sampled_from([*SAFETENSORS_DTYPES, "F32", "U8", "F4"]))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        bits = 4 if dtype == "F4" else 8 * SAFETENSORS_DTYPES[dtype].itemsize
        nbytes = math.prod(shape) * bits // 8
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    return entries, offset


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [place for key, each in inner for place in places(each, (*path, key))]


def change(draw: st.DrawFn, value: Any) -> Any:
    """Put something else in one place, take it away, or put it in twice."""
    value = copy.deepcopy(value)
    chosen = [place for place in places(value) if place]
    if not chosen:
        return draw(odd)
    *path, last = draw(st.sampled_from(chosen))
    holder = value
    for key in path:
        holder = holder[key]
    how = draw(st.sampled_from(["other", "near", "remove", "double", "rename"]))
    if how == "near" and type(holder[last]) is int:
        holder[last] += draw(st.sampled_from([-8, -4, -2, -1, 1, 2, 4, 8]))
    elif how == "remove":
        del holder[last]
    elif how == "double" and isinstance(holder, list):
        holder.insert(0, holder[last])
    elif how == "double" or (how == "rename" and isinstance(holder, dict)):
        holder[draw(st.text(max_size=2))] = copy.deepcopy(holder[last])
        if how == "rename":
            holder.pop(last, None)
    else:
        holder[last] = draw(odd)
    return value


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """A safetensors file, as it should be or with a few changes."""
    entries, nbytes = draw(headers())
    header: Any = entries
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1, 2]))):
        header = change(draw, header)
    text = bytearray(json.dumps(header, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass"))
    if draw(st.integers(0, 7)) == 7 and len(text) > 2:  # the last entry twice, or a part of it
        text[-1:] = b"," + text[1:]
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 3]))):
        if text:
            text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255))
    text += b" " * draw(st.sampled_from([0, 0, 3]))
    length = max(0, len(text) + draw(st.sampled_from([0] * 20 + [-1, 1, 8, 1 << 30, 1 << 63])))
    nbytes = max(0, nbytes + draw(st.sampled_from([0] * 16 + [-1, 1, 2, 16])))
    whole = (length % 2**64).to_bytes(8, "little") + text + draw(st.binary(min_size=nbytes, max_size=nbytes))
    return whole[: draw(st.sampled_from([len(whole)] * 16 + [0, 7, 8, len(whole) // 2]))]


def by_library(content: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    """What the library makes of it; None if it refuses."""
    try:
        return {name: (each["dtype"], each["shape"], bytes(each["data"])) for name, each in deserialize(content)}
    except SafetensorError:
        return None


@fuzz
@given(content=contents())
def test_headers(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    expected = by_library(content)
    note(f"the library: {expected}")
    try:
        found = in_time(lambda: Checkpoint([file])).tensors
    except NoReplay as reason:
        known = expected is not None and all(dtype in SAFETENSORS_DTYPES for dtype, _, _ in expected.values())
        assert not known, f"refused though the library takes it: {reason}"
        return
    assert expected is not None
    assert {
        name: (each.dtype, list(each.shape), content[each.offset :][: each.nbytes]) for name, each in found.items()
    } == {name: (SAFETENSORS_DTYPES[dtype], shape, data) for name, (dtype, shape, data) in expected.items()}


def test_headers_are_of_both_kinds() -> None:
    """Else the test above would show nothing."""
    kinds = {True: 0, False: 0}

    @fuzz
    @given(content=contents())
    def count(content: bytes) -> None:
        kinds[bool(by_library(content))] += 1

    count()
    assert min(kinds.values()) > 40, kinds


# --- Manifests -----------------------------------------------------------------------------------------------------

ENGINE = Engine("org/model", "0.30.0", "torch.bfloat16", None, {"tp": [0, 2], "pp": [0, 1]})


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    tensors = {"a": torch.arange(12).view(3, 4).t(), "b": torch.tensor(0.5), "c": torch.zeros(100, dtype=torch.uint8)}
    found = storages(tensors.items(), torch.device("cpu"), set(), set())
    path = ENGINE.folder(tmp_path_factory.mktemp("snapshots")) / f"{ENGINE.rank}.json"
    return write(path, ENGINE, found, digests_of(found))


@st.composite
def manifests(draw: st.DrawFn, given: Any) -> bytes:
    changed = given
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        changed = change(draw, changed)
    text = bytearray(json.dumps(changed, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 0, 1, 3]))):
        text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255))
    return bytes(text[: draw(st.sampled_from([len(text)] * 6 + [0, len(text) // 2]))])


def test_manifests(taken: Snapshot, tmp_path: Path) -> None:
    """One that is accepted names the file that is there and bytes in it; else it is an error of this package."""
    content = taken.path.read_text()
    found = {"as written": 0, "accepted": 0, "refused": 0}

    @settings(fuzz, max_examples=600)
    @given(content=manifests(json.loads(content)))
    def read(content: bytes) -> None:
        taken.path.write_bytes(content)
        try:
            manifest = in_time(lambda: Manifest.read(taken.path))
        except SnapshotError as error:
            str(error).encode()  # can be sent and printed
            found["refused"] += 1
            return
        found["as written" if manifest == taken.manifest else "accepted"] += 1
        assert manifest.file == taken.file.name or (
            re.fullmatch(rf"{taken.path.stem}-[0-9a-f]{{16}}\.safetensors", manifest.file)
            and manifest.digests() != taken.manifest.digests()
        )
        assert all(0 < each.offset <= each.offset + each.nbytes <= manifest.size for each in manifest.entries)
        assert all(
            isinstance(each["name"], str) and each["name"] for entry in manifest.entries for each in entry.tensors
        )
        manifest.unlike(ENGINE), manifest.misfits([]), manifest.engine.dtype.split(".")
        if manifest != taken.manifest:
            taken.forget()

    read()
    taken.path.write_text(content)
    assert Manifest.read(taken.path) == taken.manifest and taken.file.exists()
    assert found["accepted"] > 3 and found["as written"] > 20 and found["refused"] > 200, found
