"""Environment of every test process, set before vLLM is imported.

With ``TESTS_AS_CPU=avx2`` vLLM loads the operators that it has for CPUs without AVX-512, here and in child processes.
"""

import os
import runpy
from pathlib import Path

if (kind := os.environ.get("TESTS_AS_CPU")) is not None:
    folder = Path(__file__).parent / "support" / kind
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    runpy.run_path(str(folder / "sitecustomize.py"))

os.environ.update(
    VLLM_PLUGINS="lora_reload",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",  # tiny tensors
)
