"""What tests rest on, whatever the CPU: the kind that vLLM sees can be chosen, and engines in a process are apart."""

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine import Engine

pytestmark = pytest.mark.engine
SHOW = "import torch; from vllm import _custom_ops; print(hasattr(torch.ops._C, {!r}))"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="vLLM has one library for each other kind of CPU")
def test_operators_of_cpus_without_avx512_can_be_chosen() -> None:
    """Child processes have the choice from ``PYTHONPATH``, as `tests.conftest` sets it."""
    folder = Path(__file__).parents[1] / "support" / "avx2"
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    for operator, there in (("onednn_mm", "True"), ("cpu_gemm_wna16", "False")):
        program = subprocess.run(
            [sys.executable, "-c", SHOW.format(operator)],
            env=os.environ | {"PYTHONPATH": paths, "VLLM_PLUGINS": "none"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert program.stdout.split()[-1] == there


def test_an_engine_that_fails_takes_no_other_down(engine: Engine, tmp_path: Path) -> None:
    other = Engine(tmp_path)
    other.runner.execute_model = None
    with pytest.raises(TypeError):
        other.ask("base")
    del other
    gc.collect()
    assert engine.ask() == engine.before
