"""Every model class of vLLM that supports LoRA, tiny and with random weights, through one sleep and reload."""
