"""What the two state machines over a real engine share: versions of weights, what is right for each, and the dice.

A run is a list of random steps from a seed. ``TESTS_SEED`` sets it, else each run has a new one; a failure shows it,
with the last steps. ``TESTS_STEPS`` sets how many steps there are.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .checkpoints import PEFT_CONFIG, make_adapter, make_checkpoint
from .scenario import checkpoint_tensors

BASES = ("A", "B")
WEIGHTS = (1, 2, 3, 4)
NAMES = ("ant", "bee", "cow", "dog", "eel")
PROMPT = {"prompt_token_ids": [3 + 7 * position % 500 for position in range(70)]}  # two blocks of cache and a bit
TOKENS = 6
PROJECTIONS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
# One slot and one place in host memory fewer than there are names. The last slot is the adapter's that adds nothing: to
# requests without an adapter, vLLM's CPU kernels add the last slot.
NOTHING = "nothing"
ENGINE: dict[str, Any] = dict(max_loras=4, max_cpu_loras=5, enable_prefix_caching=True, block_size=32)


class Versions:
    """Base weights of two checkpoints, ``A`` and ``B``, and four sets of adapter weights for both."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.checkpoints = {"A": checkpoint, "B": make_checkpoint(folder / "B", seed=7, shards=2)}
        self.bases = {base: checkpoint_tensors(path, "cpu") for base, path in self.checkpoints.items()}
        self.folders = {
            weights: make_adapter(
                folder / f"weights{weights}", checkpoint, seed=10 + weights, target_modules=PROJECTIONS
            )
            for weights in WEIGHTS
        }
        self.tensors = {
            weights: load_file(path / "adapter_model.safetensors") for weights, path in self.folders.items()
        }
        self.nothing = {name: torch.zeros_like(tensor) for name, tensor in self.tensors[1].items()}
        self.config = PEFT_CONFIG | {"target_modules": list(PROJECTIONS)}


def of_pool(digests: dict[str, str], of_base: bool) -> dict[str, str]:
    """The part of ``pool_digests`` that is outside the slots: the base model's tensors, or punica's."""
    return {
        name: digest
        for name, digest in digests.items()
        if "_stacked" not in name and name.startswith("punica") is not of_base
    }


class Dice:
    """Random choices of one run, and what was chosen."""

    def __init__(self, steps: int) -> None:
        self.seed = int(os.environ.get("TESTS_SEED") or random.SystemRandom().randrange(1 << 32))
        self.steps = int(os.environ.get("TESTS_STEPS") or steps)
        self.random = random.Random(self.seed)
        self.taken: list[str] = []

    def note(self, step: str) -> None:
        self.taken.append(step)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Add the seed and the last steps to what goes wrong."""
        print(f"TESTS_SEED={self.seed}")
        try:
            yield
        except BaseException as error:
            last = "\n  ".join(self.taken[-40:])
            where = f"TESTS_SEED={self.seed}, step {len(self.taken)}"
            raise AssertionError(f"{where}: {type(error).__name__}: {error}\nlast steps:\n  {last}") from error
