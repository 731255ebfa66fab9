"""Settings, ranks and the carrying of tensors."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_lora_reload import AdapterRefusedError, SettingError, nearest_max_lora_rank, seams, staging
from vllm_lora_reload.settings import Settings


def config(**given: Any) -> Any:
    return SimpleNamespace(additional_config={"lora_reload": given, "other": {"x": 1}})


def test_defaults() -> None:
    expected = Settings(adapters="keep", on_missing="refuse")
    for empty in (config(), SimpleNamespace(additional_config={}), SimpleNamespace(additional_config=None)):
        assert Settings.of(empty, {}) == expected


def test_config_goes_before_environment() -> None:
    environ = {"VLLM_LORA_RELOAD_ADAPTERS": "drop", "VLLM_LORA_RELOAD_ON_MISSING": "warn"}
    assert Settings.of(config(on_missing="reload"), environ) == Settings(adapters="drop", on_missing="reload")


def test_paths_and_numbers() -> None:
    environ = {
        "VLLM_LORA_RELOAD_SNAPSHOT_DIR": "/data",
        "VLLM_LORA_RELOAD_RING_BYTES": "256M",
        "VLLM_LORA_RELOAD_RING_CHUNK": "4M",
    }
    settings = Settings.of(config(ring_threads=4, ring_chunk=8192), environ)
    assert (settings.snapshot_dir, settings.ring_bytes) == ("/data", 256 << 20)
    assert (settings.ring_threads, settings.ring_chunk) == (4, 8192)
    assert Settings.of(config(snapshot_dir=Path("/x")), {}).snapshot_dir == "/x"
    assert Settings.of(config(snapshot_dir="~/x"), {}).snapshot_dir == str(Path.home() / "x")
    assert Settings.of(config(snapshot_dir="x"), {}).snapshot_dir == str(Path.cwd() / "x")


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({"adapter": "keep"}, {}, r"has no setting 'adapter'; there are \['adapters', 'on_missing', 'snapshot_dir'"),
        ({"adapters": "kept"}, {}, r"adapters .* is 'kept', not one of \['keep', 'drop'\]"),
        ({}, {"VLLM_LORA_RELOAD_ON_MISSING": "ignore"}, r"on_missing .* is 'ignore'"),
        ({"snapshot_dir": 3}, {}, "snapshot_dir .* is 3, not a path"),
        ({"snapshot": True}, {}, r"snapshot .* is True, not one of \['once', 'always', 'never'\]"),
        ({"ring_bytes": "a lot"}, {}, "ring_bytes .* is 'a lot', not a number of at least 2097152"),
        ({"ring_bytes": 1000}, {}, "ring_bytes .* is 1000, not a number"),
        ({"ring_threads": -1}, {}, "ring_threads .* is -1, not a number of at least 0"),
        ({"ring_threads": True}, {}, "ring_threads .* is True, not a number"),
        (
            {"ring_chunk": 4096},
            {},
            "ring_chunk .* is 4096, not between 8192 and half of ring_bytes, which is 536870912",
        ),
        ({"ring_chunk": 4 << 20, "ring_bytes": 4 << 20}, {}, "ring_chunk .* is 4194304, not between"),
        ({}, {"VLLM_LORA_RELOAD_RING_CHUNK": "1000"}, "ring_chunk .* is '1000', .* in multiples of 4096"),
    ],
)
def test_what_does_not_exist_is_refused(given: Any, environ: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Settings.of(config(**given), environ)


def test_ranks_are_those_of_the_installed_engine() -> None:
    allowed = seams.max_lora_ranks()
    assert allowed == sorted(allowed) and {8, 16, 32, 64} <= set(allowed)
    for rank in range(1, allowed[-1] + 1):
        nearest = nearest_max_lora_rank(rank)
        assert nearest in allowed and nearest >= rank
        assert not [value for value in allowed if rank <= value < nearest]
    for rank in (0, allowed[-1] + 1):
        with pytest.raises(ValueError, match=f"rank {rank}: vLLM .* accepts max_lora_rank of"):
            nearest_max_lora_rank(rank)


def test_names_as_in_a_file() -> None:
    given = {
        "base_model.model.q_proj.lora_A.default.weight": torch.ones(2),
        "base_model.model.q_proj.lora_B.policy.weight": torch.ones(2),
        "base_model.model.embed_tokens.lora_embedding_A.default": torch.ones(2),
        "base_model.model.o_proj.lora_A.weight": torch.ones(2),
        "base_model.model.embed_tokens.lora_embedding_B": torch.ones(2),
    }
    assert list(staging.peft_names(given)) == [
        "base_model.model.q_proj.lora_A.weight",
        "base_model.model.q_proj.lora_B.weight",
        "base_model.model.embed_tokens.lora_embedding_A",
        "base_model.model.o_proj.lora_A.weight",
        "base_model.model.embed_tokens.lora_embedding_B",
    ]


def test_tensors_of_two_adapters_are_refused() -> None:
    """Of a PEFT model with a reference adapter, say: only one would be left."""
    given = {f"base_model.model.q_proj.lora_A.{name}.weight": torch.ones(2) for name in ("default", "reference")}
    with pytest.raises(AdapterRefusedError, match=r"lora_A.default.weight and .*lora_A.reference.weight"):
        staging.peft_names(given)


@pytest.mark.parametrize("shared", ["there", "small", "absent"])
def test_folder_is_written_and_gone_afterwards(shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SHARED_MEMORY", tmp_path if shared != "absent" else tmp_path / "absent")
    if shared == "small":  # as a container's, by default
        monkeypatch.setattr(staging, "_MARGIN", shutil.disk_usage(tmp_path).total)
    tensor = torch.arange(6.0).view(2, 3).t()
    with staging.write({"x.lora_A.weight": tensor}, {"r": 2, "target_modules": {"b", "a"}}) as name:
        folder = Path(name)
        assert (folder.parent == tmp_path) is (shared == "there")
        assert torch.equal(load_file(folder / "adapter_model.safetensors")["x.lora_A.weight"], tensor)
        assert json.loads((folder / "adapter_config.json").read_text()) == {"r": 2, "target_modules": ["a", "b"]}
    assert not folder.exists()


def test_worker_that_does_not_see_the_folder(tmp_path: Path) -> None:
    with staging.write({"x": torch.ones(1)}, {"r": 1}) as name:
        folder = Path(name)
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        with staging.folder(str(folder), None) as seen:
            assert seen == str(folder)
    with pytest.raises(FileNotFoundError, match=str(folder)), staging.folder(str(folder), None):
        pass
    with staging.folder(str(folder), files) as seen:
        assert {file.name: file.read_bytes() for file in Path(seen).iterdir()} == files
    assert not Path(seen).exists()
