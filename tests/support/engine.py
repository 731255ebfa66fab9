"""One real engine in the test process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checkpoints import make_adapter, make_checkpoint
from .quantized import quantize
from .scenario import PROMPTS, Scenario, engine_args

Answers = dict[str, list[list[int]]]


class Engine:
    """A tiny Llama with two adapters, loaded and answering; its checkpoint lies in three shards.

    `method` is one of `quantized.METHODS`; the checkpoint as it was before is then in the folder ``source``.
    `more` goes to ``LLM``.
    """

    def __init__(self, folder: Path, method: str | None = None, **more: Any) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self.folder = folder
        self.checkpoint = source = make_checkpoint(folder / ("source" if method else "model"), shards=3)
        if method:
            self.checkpoint = quantize(source, folder / "model", method)
        self.requests: dict[str, Any] = {"base": None}
        for number in (1, 2):
            path = make_adapter(folder / f"adapter{number}", source, seed=number)
            self.requests[f"adapter {number}"] = LoRARequest(f"adapter{number}", number, str(path))
        self.llm = LLM(**engine_args(Scenario(engine=more), self.checkpoint))
        self.worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        self.model = self.runner.get_model()
        self.ask()
        self.before = self.ask()
        self.digests = self.worker.pool_digests()

    def ask(self, *who: str) -> Answers:
        """Greedy tokens by who answers: ``base``, ``adapter 1``, ``adapter 2``."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        outputs = {
            name: self.llm.generate(list(PROMPTS), greedy, lora_request=self.requests[name], use_tqdm=False)
            for name in who or self.requests
        }
        return {name: [list(o.outputs[0].token_ids) for o in output] for name, output in outputs.items()}

    def lose_weights(self) -> None:
        self.llm.sleep(level=2)
        self.llm.wake_up(["weights"])
        self.llm.wake_up(["kv_cache"])

    def reload(self, **kwargs: Any) -> None:
        self.llm.collective_rpc("reload_weights", kwargs=kwargs)

    def differing(self) -> list[str]:
        """Names of pool tensors whose bytes are not those before the first sleep."""
        now = self.worker.pool_digests()
        return [name for name, digest in self.digests.items() if now[name] != digest]

    def checkpoint_tensors(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        return {k: v for file in sorted(self.checkpoint.glob("*.safetensors")) for k, v in load_file(file).items()}

    def assert_whole(self) -> None:
        """Wrappers in place, nothing on the meta device, bytes and answers as before."""
        assert self.worker.meta_tensors() == []
        assert self.worker.wrapper_names() == self.wrappers
        assert self.differing() == []
        assert self.ask() == self.before

    @property
    def wrappers(self) -> list[str]:
        layer = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
        layers = [f"model.layers.{i}.{name}" for i in range(2) for name in layer]
        return ["model.embed_tokens", *layers, "logits_processor"]
