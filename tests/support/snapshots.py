"""Snapshots for workers that were started without the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_lora_reload import seams
from vllm_lora_reload.keeper import SnapshotKeeper
from vllm_lora_reload.snapshot import Engine


def take_snapshot(worker: Any, folder: Path) -> SnapshotKeeper:
    """As the worker of an engine with ``snapshot_dir`` does when it has warmed up; waits until it is written.

    Raises:
        RuntimeError: it could not be.
    """
    state, engine = worker.lora_reload, Engine(**seams.identity(worker.model_runner.vllm_config))
    state.keeper = keeper = SnapshotKeeper(
        folder, engine, "once", "full", state.ring, state.base_storages, state.base_storages()[0].memory.device
    )
    keeper.started()
    if (taken := keeper.take())["state"] != "valid":
        raise RuntimeError(f"no snapshot: {taken['reason']}")
    return keeper
