"""Snapshots over real sleep, and the ring and the writer on a real device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.scenario import Scenario, run
from vllm_lora_reload.ring import Piece, Ring
from vllm_lora_reload.snapshot import Engine, Snapshot, digests_of, storages, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ENGINE = Engine("model", "0", "torch.bfloat16", None, {"tp": [0, 1], "pp": [0, 1]})


@pytest.mark.parametrize("reader", ["buffered", "direct"])
def test_bytes_of_many_pieces(reader: Any, tmp_path: Path) -> None:
    """Chunks, gaps, columns of a matrix, another type: as on the CPU (tests/unit/test_ring.py)."""
    device = torch.device("cuda")
    content = torch.randint(0, 256, (300_000_007,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    file = tmp_path / "weights"
    file.write_bytes(content.numpy().tobytes())
    ring = Ring(device, threads=4, reader=reader)
    flat = torch.empty(100_000_001, dtype=torch.uint8, device=device)
    columns = torch.zeros(5000, 4096, dtype=torch.float32, device=device)
    for _ in range(2):
        flat.fill_(0xFF)
        columns.fill_(-1)
        pieces = [Piece(200_000_003, flat), Piece(5, columns[:, :2000], (8192, 1), torch.bfloat16)]
        ring.read({file: pieces})
        assert torch.equal(flat.cpu(), content[200_000_003:300_000_004])
        source = (
            content[5 : 5 + (4999 * 8192 + 2000) * 2].clone().view(torch.bfloat16).as_strided((5000, 2000), (8192, 1))
        )
        got = columns[:, :2000].cpu()
        assert torch.equal(got.view(torch.int32), source.float().view(torch.int32))
        assert (columns[:, 2000:] == -1).all()
    assert ring.nbytes == 4 * 2 * 4 << 20
    ring.close()


def test_written_and_read_back(tmp_path: Path) -> None:
    device = torch.device("cuda")
    tensors = {f"t{n}": torch.randn(n * 1_000_003 + 1, device=device) for n in range(9)}
    found = storages(tensors.items(), device, set(), set())
    current = digests_of(found)
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    path = ENGINE.folder(tmp_path) / f"{ENGINE.rank}.json"
    write(path, ENGINE, found, current)
    taken = Snapshot.find(path, ENGINE, found, current)
    for tensor in tensors.values():
        tensor.fill_(0)
    ring = Ring(device)
    taken.restore(found, ring)
    taken.check(found)
    ring.close()
    assert all(torch.equal(tensors[name], value) for name, value in values.items())


@pytest.mark.engine
@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(),
        Scenario(engine={"enforce_eager": False}),
        Scenario(family="qwen3_moe"),
        Scenario(engine={"quantization": "fp8"}),
        Scenario(quantization="compressed-tensors-fp8"),
        Scenario(engine={"tensor_parallel_size": 2}),
        Scenario(engine={"pipeline_parallel_size": 2}),
    ],
    ids=["eager", "graphs", "experts", "online-fp8", "checkpoint-fp8", "tp2", "pp2"],
)
def test_weights_come_back_by_themselves(scenario: Scenario, tmp_path: Path) -> None:
    ranks = scenario.engine.get("tensor_parallel_size", 1) * scenario.engine.get("pipeline_parallel_size", 1)
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    setting = {"snapshot_dir": str(tmp_path), "ring_bytes": 64 << 20}
    scenario.on_gpu, scenario.cycles, scenario.max_tokens, scenario.ways = True, 3, 8, ("snapshot",)
    scenario.engine["additional_config"] = {"lora_reload": setting}
    report = run(scenario, VLLM_ENABLE_V1_MULTIPROCESSING="1" if ranks > 1 else "0")
    assert len(report.cycles) == 3 and report.distinct_answers == 3
    assert report.right, report
    assert all(cycle.restored == ["snapshot"] * ranks for cycle in report.cycles), report
    assert len(list(tmp_path.glob("*/*.safetensors"))) == ranks
