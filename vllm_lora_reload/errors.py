"""What this package raises."""


class LoRAReloadError(Exception):
    """Base class of every error that this package raises itself."""


class SeamMissingError(LoRAReloadError, RuntimeError):
    """This vLLM release lacks a place that the package must extend."""


class SettingError(LoRAReloadError, ValueError):
    """A setting has a name or a value that does not exist."""


class WeightsMissingError(LoRAReloadError, ValueError):
    """A request came while base weights are missing, or asleep. vLLM's servers answer 4xx."""


class AdapterMissingError(LoRAReloadError, ValueError):
    """A request came for an adapter whose weights could not be put back. vLLM's servers answer 4xx."""


class AsleepError(LoRAReloadError, RuntimeError):
    """Base weights were to be loaded, or given up, while their memory is unmapped."""


class AdapterRefusedError(LoRAReloadError, ValueError):
    """An update of an adapter did not fit on every worker; all of them keep the old one."""


class SnapshotError(LoRAReloadError, RuntimeError):
    """A snapshot does not fit the engine, or is damaged."""
