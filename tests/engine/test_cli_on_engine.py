"""`vllm-lora-reload snapshot` and `doctor` as a user calls them: each in a process of its own, with a real engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from vllm_lora_reload.snapshot import Manifest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
LATER_ENGINE = """
import json, sys
from vllm import LLM

if __name__ == "__main__":
    model, folder, out = sys.argv[1:]
    settings = {"lora_reload": {"snapshot_dir": folder, "snapshot": "never"}}
    llm = LLM(model, enable_lora=True, max_model_len=256, enforce_eager=True, additional_config=settings)
    found = llm.collective_rpc("lora_reload_status")[0]["snapshot"]
    with open(out, "w") as file:
        json.dump([found, llm.collective_rpc("lora_reload_take_snapshot")[0]], file)
"""


def call(*command: str, plugins: str = "lora_reload") -> "subprocess.CompletedProcess[str]":
    """A fresh process, with engine cores and workers in processes of their own."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"VLLM_PLUGINS": plugins, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": paths}
    return subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=300)


def doctor(folder: Path, status: int) -> list[dict[str, Any]]:
    """Rows about snapshots, as JSON has them."""
    arguments = ["doctor", "--snapshot-dir", str(folder), "--verify", "--json"]
    done = call("-m", "vllm_lora_reload.cli", *arguments)
    assert done.returncode == status, done.stdout + done.stderr
    return [check for check in json.loads(done.stdout)["checks"] if check["name"] == "snapshot"]


def test_a_snapshot_is_written_for_later_engines(tmp_path: Path) -> None:
    model, folder = str(make_checkpoint(tmp_path / "model")), tmp_path / "snapshots"
    take = ["-m", "vllm_lora_reload.cli", "snapshot", model, "--snapshot-dir", str(folder)]
    # `--max_model_len`, as vLLM's own command also takes it. The package is selected beside what was.
    taken = call(*take, "--enforce-eager", "--max_model_len", "256", plugins="something_else")
    assert taken.returncode == 0, taken.stdout + taken.stderr
    (manifest,) = folder.glob("*/*.json")
    file = manifest.parent / Manifest.read(manifest).file
    assert f"rank 0: {file}, " in taken.stdout and " written at " in taken.stdout

    program, out = tmp_path / "later.py", tmp_path / "out.json"
    program.write_text(LATER_ENGINE)
    later = call(str(program), model, str(folder), str(out))
    assert later.returncode == 0, later.stdout + later.stderr
    for found in json.loads(out.read_text()):
        assert found["state"] == "valid" and found["path"] == str(file) and found["seconds"] is None

    (row,) = doctor(folder, status=0)
    assert row["status"] == "ok" and "every digest is right" in row["detail"]
    damaged = Manifest.read(manifest).entries[3]
    content = bytearray(file.read_bytes())
    content[damaged.offset + damaged.nbytes // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(0, Manifest.read(manifest).mtime_ns))
    (row,) = doctor(folder, status=1)
    assert row["status"] == "problem" and f"1 tensors ({damaged.name})" in row["detail"]


def test_an_engine_that_cannot_start(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    taken = call("-m", "vllm_lora_reload.cli", "snapshot", str(tmp_path), "--snapshot-dir", str(folder))
    assert taken.returncode == 1 and "vllm-lora-reload: no snapshot was taken: " in taken.stderr
    assert not folder.exists()
