"""Errors of failed loads name the tensor and the file, and stay what they were."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_lora_reload.diagnosis import annotate, where


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("bad"), RuntimeError("bad", 3)])
def test_message_is_extended(error: Exception) -> None:
    annotate(error, "while loading x")
    assert "bad [while loading x]" in str(error)


def test_empty_message_becomes_the_note() -> None:
    error = AssertionError()
    annotate(error, "while loading x")
    assert str(error) == "while loading x"


def test_errno_is_kept() -> None:
    error = OSError(28, "No space left on device")
    annotate(error, "while loading x")
    assert error.errno == 28 and error.strerror == "No space left on device"


def test_where(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(1000)}, tmp_path / "2.safetensors")
    second = tmp_path / "2.safetensors"
    assert where("b", tmp_path) == f"while loading b from {second}"
    assert where("c", tmp_path) == "while loading c"
    assert where("c", None) == "while loading c"
    assert where(None, tmp_path) is None and where(None, None) is None
    second.write_bytes(second.read_bytes()[:100])
    assert str(where("a", tmp_path)).startswith(f"{second} is damaged: ")
    assert where("a", tmp_path / "gone") == f"{tmp_path / 'gone'} is not a folder"
