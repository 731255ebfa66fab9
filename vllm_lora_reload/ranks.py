"""vLLM accepts only certain values of ``max_lora_rank``."""

from __future__ import annotations

from . import seams


def nearest_max_lora_rank(rank: int) -> int:
    """The smallest ``max_lora_rank`` that the installed vLLM accepts and that holds adapters of `rank`.

    Args:
        rank: the adapter's ``r``.

    Raises:
        ValueError: no rank is below 1, and none above the largest accepted value.
    """
    allowed = seams.max_lora_ranks()
    if not 1 <= rank <= allowed[-1]:
        raise ValueError(f"rank {rank}: vLLM {seams.release()} accepts max_lora_rank of {allowed}")
    return next(value for value in allowed if value >= rank)
