"""What this package raises."""


class LoRAReloadError(Exception):
    """Base class of every error that this package raises itself."""


class SeamMissingError(LoRAReloadError, RuntimeError):
    """This vLLM release lacks a place that the package must extend."""


class WeightsMissingError(LoRAReloadError, ValueError):
    """A request came while base weights are missing. vLLM's servers answer 4xx."""
