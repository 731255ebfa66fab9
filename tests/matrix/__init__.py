"""The package on the Python half of many vLLM releases: ``make matrix``."""

# In every release minicpm loads with a flat loop over `named_parameters`. The others do so in some releases and leave
# it to `AutoWeightsLoader` in others. qwen3_moe and mixtral have experts.
FAMILIES = ("llama", "minicpm", "qwen3", "qwen3_moe", "mixtral")

# Ways to load weights after sleep at level 2, and what they are.
PATHS = {
    "disk": "`reload_weights()` by vLLM's own loader",
    "replay": "`reload_weights()` by the plan of the first load",
    "snapshot": '`wake_up(["weights"])` alone, which restores a snapshot',
    "iterator": "`reload_weights(weights_iterator=...)`",
    "kernel format": "`reload_weights(weights_iterator=..., is_checkpoint_format=False)`",
    "load_weights": "`model.load_weights(...)` with all tensors",
    "one a call": "`model.load_weights(...)` once per tensor",
    "base_layer names": "`model.load_weights(...)` with `.base_layer.` in names",
    "as verl": "`model.load_weights(...)` in buckets, then `process_weights_after_loading(model, ...)`",
    "dummy": 'the same in an engine that started with `load_format="dummy"`, refused until the last bucket',
    "after failures": "`reload_weights()`, after a stream of weights that broke off and one with a wrong shape",
    "transfer": "weight transfer with vLLM's NCCL engine, tensors handed over in the process; a session of several "
    "chunks where the release has sessions (from 0.21), else one call",
    "sparse": "`reload_weights()`, then single elements changed and changed back by vLLM's sparse transfer, where the "
    "release has it",
}

# The same from disk, in a state that must not give the bytes that were there before.
CONTROLS = {
    "without": "without this package",
    "no reset": "with the reset of LoRA state taken out",
    "no view": "with the base view taken out; models whose `load_weights` is left to vLLM's `AutoWeightsLoader` do not "
    "need it, so only minicpm must fail",
}

EQUAL = "equal"
NO_SUCH_PATH = "no such path"
