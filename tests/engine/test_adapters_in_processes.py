"""Adapters of every kind where the engine core, and two ranks, have processes of their own."""

import pytest

from tests.support.adapter_cycles import MODULE
from tests.support.scenario import Scenario, run

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("ranks", [1, 2])
def test_pinned_gone_changed_and_tensor_only_adapters(ranks: int) -> None:
    report = run(
        Scenario(cycles=3, max_tokens=8, engine={"tensor_parallel_size": ranks}),
        module=MODULE,
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        **({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}),
    )
    assert report.distinct_answers == 3 and len(report.cycles) == 3
    assert report.right, report
