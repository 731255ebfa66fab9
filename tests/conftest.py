"""Environment of every test process, set before vLLM is imported."""

import os

os.environ.update(
    VLLM_PLUGINS="lora_reload",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",  # tiny tensors
)
