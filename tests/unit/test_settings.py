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
    environ = {"LORA_RELOAD_ADAPTERS": "drop", "LORA_RELOAD_ON_MISSING": "warn"}
    assert Settings.of(config(on_missing="reload"), environ) == Settings(adapters="drop", on_missing="reload")


def test_first_names_of_variables_still_count() -> None:
    old = {"VLLM_LORA_RELOAD_ADAPTERS": "drop", "VLLM_LORA_RELOAD_VERIFY": "off"}
    assert Settings.of(config(), old) == Settings(adapters="drop", verify="off")
    assert Settings.of(config(), old | {"LORA_RELOAD_ADAPTERS": "keep"}) == Settings(verify="off")


def test_paths_and_numbers() -> None:
    environ = {
        "LORA_RELOAD_SNAPSHOT_DIR": "/data",
        "LORA_RELOAD_RING_BYTES": "256M",
        "LORA_RELOAD_RING_CHUNK": "4M",
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
        ({"frobs": "keep"}, {}, r"has no setting 'frobs'; there are \['adapters', 'on_missing', 'snapshot_dir'"),
        ({"adapter": "keep"}, {}, r"has no setting 'adapter'; did you mean 'adapters'\? There are \['adapters', 'on_m"),
        ({"On-Missing": "warn"}, {}, r"has no setting 'On-Missing'; did you mean 'on_missing'\?"),
        ({1: "keep", "adapters": "keep", None: 2}, {}, r"has no setting 1; there are \['adapters'"),
        ({"x" * 5000: 1}, {}, r"has no setting 'x{99}\.\.\.; there are"),
        ({}, {"LORA_RELOAD_ADAPTER": "drop"}, r"variable 'LORA_RELOAD_ADAPTER'; did you mean 'LORA_RELOAD_ADAPTERS'\?"),
        ({}, {"VLLM_LORA_RELOAD_VERIFI": "off"}, r"'VLLM_LORA_RELOAD_VERIFI'; did you mean 'VLLM_LORA_RELOAD_VERIFY'"),
        ({}, {"LORA_RELOAD_frobs": ""}, r"variable 'LORA_RELOAD_frobs'; there are \['LORA_RELOAD_ADAPTERS', 'LORA_"),
        ({"adapters": "keep"}, {"LORA_RELOAD_": ""}, "no environment variable 'LORA_RELOAD_'"),
        ({"adapters": "Drop"}, {}, r"adapters .* is 'Drop', not one of \['keep', 'drop'\]; did you mean 'drop'\?"),
        ({"adapters": None}, {}, r"adapters .* is None, not one of \['keep', 'drop'\]$"),
        ({"adapters": ["keep"]}, {}, r"adapters .* is \['keep'\], not one of"),
        ({"adapters": torch.ones(2)}, {}, r"adapters .* is tensor\(\[1\., 1\.\]\), not one of"),
        ({"replay": True}, {}, r"replay .* is True, not one of \['on', 'off'\], in quotes where the format has words"),
        ({"replay": False}, {}, r"replay .* is False, not one of \['on', 'off'\], in quotes"),
        ({"replay": 10**5000}, {}, r"replay .* is of type int, which cannot be printed, not one of"),
        ({"snapshot_dir": None}, {}, "snapshot_dir .* is None, not a path"),
        ({"snapshot_dir": b"/x"}, {}, "snapshot_dir .* is b'/x', not a path"),
        ({"snapshot_dir": "/x\0y"}, {}, r"snapshot_dir .* is '/x\\x00y', not a path"),
        ({"ring_threads": 10**5000}, {}, "ring_threads .* is of type int, which cannot be printed, not a number of"),
        (
            {"ring_threads": "9" * 5000},
            {},
            r"ring_threads .* is '9{99}\.\.\., not a number of at least 0 and at most 1024",
        ),
        ({"ring_threads": 2.0}, {}, "ring_threads .* is 2.0, not a number"),
        ({"ring_threads": None}, {}, "ring_threads .* is None, not a number"),
        ({}, {"LORA_RELOAD_RING_BYTES": "9" * 5000}, r"ring_bytes .* is '9{99}\.\.\., not a number"),
        ({}, {"LORA_RELOAD_RING_BYTES": "9999999G"}, "ring_bytes .* is '9999999G', not a number .* at most"),
        ({}, {"LORA_RELOAD_RING_BYTES": "\u0664\u0664M"}, "ring_bytes .* not a number"),
        ({"adapters": "kept"}, {}, r"adapters .* is 'kept', not one of \['keep', 'drop'\]"),
        ({}, {"LORA_RELOAD_ON_MISSING": "ignore"}, r"on_missing .* is 'ignore'"),
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
        ({}, {"LORA_RELOAD_RING_CHUNK": "1000"}, "ring_chunk .* is '1000', .* in multiples of 4096"),
    ],
)
def test_what_does_not_exist_is_refused(given: Any, environ: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Settings.of(SimpleNamespace(additional_config={"lora_reload": given}), environ)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (5, "5"),
        ("on", "'on'"),
        (["adapters", "keep"], r"\['adapters', 'keep'\]"),
        (True, "True"),
        (False, "False"),
        (None, "None"),
        ("", "''"),
        (10**5000, "of type int, which cannot be printed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_settings_are_a_mapping(given: Any, shown: str) -> None:
    message = rf"additional_config\['lora_reload'\] is {shown}, not a mapping of settings to values such as \{{"
    with pytest.raises(SettingError, match=message):
        Settings.of(SimpleNamespace(additional_config={"lora_reload": given}), {})


@pytest.mark.parametrize(
    "key", ["lora-reload", "LoRA_Reload", "lora_relaod", "loraReload", "lora_reloads", "lora reload"]
)
def test_misspelt_key(key: str) -> None:
    with pytest.raises(SettingError, match=f"has the key '{key}': settings of vllm-lora-reload go under 'lora_reload'"):
        Settings.of(SimpleNamespace(additional_config={key: {"adapters": "drop"}}), {})


def test_keys_of_others_are_left_alone() -> None:
    others = {
        key: {"adapters": "x"} for key in ("lora", "lora_load", "reload", "lora_config", 7, None, ("lora_reload",))
    }
    assert Settings.of(SimpleNamespace(additional_config=others), {}) == Settings()
    assert Settings.of(SimpleNamespace(additional_config=object()), {}) == Settings()


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
