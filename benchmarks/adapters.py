"""How long do adapters take to come back, and a new version of one to its first token?

    python -m benchmarks.adapters [--layers 36] [--adapters 4] [--rank 32] [--out adapters]

One engine with random weights in the shape of an 8-billion-parameter Qwen3, adapters on all projections. Three ways to
bring them back into their slots, in turn, medians: this package (from host memory, in one go), a loop over vLLM's
``activate_adapter`` (from host memory), and vLLM's way from 0.28 on (drop all, read each from disk again). Then two
ways from tensors on the device to the first token: ``update_adapter``, and a saved folder with
``add_lora(load_inplace)``. Needs a GPU for figures that mean anything. Prints a table and writes OUT.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_PLUGINS", "lora_reload")

import torch
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 12288, 32, 8, 128, 151936
WIDTHS = {  # inputs and outputs
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.o_proj": (HEADS * HEAD_DIM, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}


def make_tensors(layers: int, rank: int, seed: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for module, (inputs, outputs) in WIDTHS.items():
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * 0.01
                tensors[f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"] = values
    return tensors


def make_model(folder: Path, layers: int) -> Path:
    """A folder with config and tokenizer; the engine makes up the weights."""
    import transformers

    from tests.support.checkpoints import _tokenizer

    config: Any = transformers.AutoConfig.for_model(
        "qwen3",
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


class Bench:
    def __init__(self, folder: Path, layers: int, adapters: int, rank: int) -> None:
        from vllm import LLM

        self.folder, self.layers, self.rank = folder, layers, rank
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.config = {"r": rank, "lora_alpha": rank, "target_modules": sorted(WIDTHS), "peft_type": "LORA"}
        on_gpu: dict[str, Any] = {"enable_sleep_mode": True} if self.device == "cuda" else {}
        self.llm = LLM(
            model=str(make_model(folder / "model", layers)),
            load_format="dummy",
            enable_lora=True,
            max_loras=adapters + 1,
            max_cpu_loras=adapters + 2,
            max_lora_rank=rank,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            enable_prefix_caching=False,
            **on_gpu,
        )
        core: Any = self.llm.llm_engine.engine_core
        self.worker = core.engine_core.model_executor.driver_worker.worker
        self.adapters = self.worker.lora_reload.adapters
        self.requests = [self.save(f"adapter{n}", n, seed=n) for n in range(1, adapters + 1)]
        for request in self.requests:
            self.llm.llm_engine.add_lora(request)

    def save(self, name: str, number: int, seed: int) -> Any:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        save_file(make_tensors(self.layers, self.rank, seed, "cpu"), path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(self.config))
        return self.request(name, number, path)

    def request(self, name: str, number: int, path: Path, **more: Any) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, number, str(path), **more)

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, action: Callable[[], Any]) -> float:
        self.sync()
        start = time.perf_counter()
        action()
        self.sync()
        return time.perf_counter() - start

    # --- Back into the slots ----------------------------------------------------------------------------------

    def package(self) -> float:
        self.adapters.lora.save()
        return self.timed(self.adapters.put_back)

    def loop(self) -> float:
        manager = self.adapters.manager
        numbers = [request.lora_int_id for request in self.requests]
        for number in numbers:
            manager.deactivate_adapter(number)
        return self.timed(lambda: [manager.activate_adapter(number) for number in numbers])

    def drop(self) -> float:
        self.adapters.drop_all()
        return self.timed(lambda: [self.llm.llm_engine.add_lora(request) for request in self.requests])

    # --- From the trainer's tensors to the first token --------------------------------------------------------

    def first_token(self, request: Any) -> None:
        from vllm import SamplingParams

        once = SamplingParams(temperature=0, max_tokens=1)
        self.llm.generate([{"prompt_token_ids": [5] * 32}], once, lora_request=request, use_tqdm=False)

    def update(self, seed: int) -> float:
        from vllm_lora_reload import update_adapter

        tensors = make_tensors(self.layers, self.rank, seed, self.device)

        def run() -> None:
            self.first_token(update_adapter(self.llm, "policy", tensors, self.config).lora_request)

        return self.timed(run)

    def save_and_add(self, seed: int) -> float:
        tensors = make_tensors(self.layers, self.rank, seed, self.device)
        path = self.folder / "saved"
        path.mkdir(exist_ok=True)

        def run() -> None:
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
            (path / "adapter_config.json").write_text(json.dumps(self.config))
            self.llm.llm_engine.add_lora(self.request("saved", 77, path, load_inplace=True))
            self.first_token(self.request("saved", 77, path))

        return self.timed(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("adapters"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.layers, args.adapters, args.rank)
        megabytes = sum(t.nbytes for t in make_tensors(args.layers, args.rank, 0, "cpu").values()) / 1e6
        ways: dict[str, Callable[[int], float]] = {
            "this package": lambda seed: bench.package(),
            "loop over activate_adapter": lambda seed: bench.loop(),
            "drop, read from disk": lambda seed: bench.drop(),
        }
        bench.first_token(None)
        bench.package()  # it checks each adapter once
        reserved = torch.cuda.memory_reserved() if bench.device == "cuda" else 0
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                if name == "this package":
                    bench.package()
                seconds[name].append(way(0) / args.adapters)
        more = (torch.cuda.memory_reserved() if bench.device == "cuda" else 0) - reserved
        syncs: dict[str, Callable[[int], float]] = {
            "update_adapter": bench.update,
            "save a folder, add_lora(load_inplace)": bench.save_and_add,
        }
        to_token: dict[str, list[float]] = {name: [] for name in syncs}
        for seed in range(args.rounds + 1):
            for name, sync in syncs.items():
                took = sync(100 + seed)
                if seed:  # the first one warms up
                    to_token[name].append(took)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}; {args.adapters} adapters of rank {args.rank} on all projections, {megabytes:.0f} MB each\n")
    print("| back into the slots | ms per adapter | GB/s |\n| --- | --- | --- |")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"| {name} | {median * 1e3:.1f} | {megabytes / 1e3 / median:.1f} |")
    print("\n| tensors to first token | ms |\n| --- | --- |")
    for name, values in to_token.items():
        print(f"| {name} | {statistics.median(values) * 1e3:.0f} |")
    print(f"\ndevice memory that stayed reserved after putting back: {more} bytes")
    args.out.with_suffix(".json").write_text(
        json.dumps({"device": device, "megabytes": megabytes, "seconds": seconds, "to first token": to_token})
    )
    os._exit(0)


if __name__ == "__main__":
    main()
