"""Engines in a process of their own, looked at closely; what was seen comes back as JSON.

    python -m tests.support.stock out.json

Which plugins the engines load is the caller's choice (``VLLM_PLUGINS``), so what the package changes can be told by
comparing two such processes.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType, FunctionType, MethodType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_lora_reload"
FILES = f"{ROOT / PACKAGE}{os.sep}"
PROMPTS = [[5, 90, 17, 300], [11, 42], [77, 8, 9, 10, 11]]  # token ids

_recording = False
_calls: Counter[str] = Counter()


def look(plugins: str, timeout: float = 300) -> dict[str, Any]:
    """What `observe` sees in a fresh process.

    Args:
        plugins: value of ``VLLM_PLUGINS``.
        timeout: seconds.

    Raises:
        RuntimeError: the process failed before it could report; the message ends with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "seen.json")
        environ = os.environ | {
            "VLLM_PLUGINS": plugins,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.stock", str(out)],
            env=environ,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
        )
        if not out.exists():
            raise RuntimeError(f"exit status {done.returncode}\n{done.stdout[-8000:]}")
        seen: dict[str, Any] = json.loads(out.read_text())
        return seen


def observe(folder: Path) -> dict[str, Any]:
    """An engine without LoRA, one with, one without again, and one of a model class that cannot have LoRA."""
    from vllm.lora.request import LoRARequest

    from .checkpoints import make_adapter, make_checkpoint

    checkpoint = make_checkpoint(folder / "model")
    adapter = LoRARequest("adapter", 1, str(make_adapter(folder / "adapter", checkpoint)))
    other = make_gpt2(folder / "other")
    seen: dict[str, Any] = {}
    for name, model in (("off", checkpoint), ("on", checkpoint), ("off again", checkpoint), ("other class", other)):
        # Most of the first start is imports, which take long when every call is looked at.
        seen[name] = look_at(model, adapter if name == "on" else None, watch_start=name != "off")
        gc.collect()
        if name == "off":
            seen["modules"] = sorted(module for module in sys.modules if module.partition(".")[0] == PACKAGE)
    import vllm.v1.engine.async_llm  # noqa: F401  # a plugin may wait for it

    seen["finders"] = [where(finder) for finder in sys.meta_path]
    seen["altered"] = sorted(altered())
    return seen


def look_at(checkpoint: Path, adapter: Any, watch_start: bool) -> dict[str, Any]:
    """Start an engine, look at its parts, let it answer and count the package's function calls meanwhile."""
    from vllm import LLM, SamplingParams

    lora: dict[str, Any] = dict(enable_lora=True, max_loras=2, max_lora_rank=16) if adapter else {}
    seen: dict[str, Any] = {}
    with recorded() if watch_start else nullcontext() as seen["calls, start"]:
        llm = LLM(
            model=str(checkpoint),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            num_gpu_blocks_override=64,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **lora,
        )

    def ask(who: str, tokens: int) -> list[list[int]]:
        greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, greedy, lora_request=requests[who], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    requests = {"base": None} | ({"adapter": adapter} if adapter else {})
    seen["parts"] = {name: anatomy(part) for name, part in parts(llm).items()}
    seen["answers"] = {who: ask(who, 16) for who in requests}
    for who in requests:
        for tokens in (4, 16):
            with recorded() as seen[f"calls, {who}, {tokens} tokens"]:
                ask(who, tokens)
    if not adapter or PACKAGE in sys.modules:  # with LoRA on, not every release can reload without the package
        with recorded() as seen["calls, cycle"]:
            cycle(llm)
        seen["answers after the cycle"] = {who: ask(who, 16) for who in requests}
    return seen


def cycle(llm: Any) -> None:
    """Level 1, which takes nothing away: the CPU engine has no sleep mode."""
    llm.sleep(level=1)
    llm.wake_up()
    llm.collective_rpc("reload_weights")


def make_gpt2(path: Path) -> Path:
    """Write a random GPT-2, which has no LoRA in vLLM, into the folder `path` and return `path`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config: Any = GPT2Config(vocab_size=512, n_positions=512, n_embd=128, n_layer=2, n_head=4, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = GPT2LMHeadModel(config)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def parts(llm: Any) -> dict[str, Any]:
    """The objects an engine in this process is made of, from the front end to the last submodule of its model."""
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    driver = core.model_executor.driver_worker
    runner = driver.worker.model_runner
    model = runner.get_model()
    return {
        "LLM": llm,
        "LLMEngine": engine,
        "core client": engine.engine_core,
        "core": core,
        "scheduler": core.scheduler,
        "executor": core.model_executor,
        "driver": driver,
        "worker": driver.worker,
        "runner": runner,
        **{f"model.{name}": module for name, module in model.named_modules(remove_duplicate=False)},
    }


def anatomy(part: Any) -> dict[str, Any]:
    """Classes, methods and attributes of one object, without their values."""
    cls = type(part)
    home: Any = sys.modules[cls.__module__]
    for name in cls.__qualname__.split("."):
        home = vars(home).get(name)
        if home is None:
            break
    return {
        "classes": [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__],
        "is the class of that name": home is cls,
        "methods": {name: where(inspect.getattr_static(cls, name)) for name in dir(cls)},
        "attributes": {name: where(value) for name, value in sorted(vars(part).items())},
    }


def where(value: Any) -> str:
    """Where a function was defined; of other objects, what class they have."""
    function = value
    if type(value) is property:
        function = value.fget
    elif type(value) in (classmethod, staticmethod, MethodType):
        function = value.__func__
    if type(function) is FunctionType:
        return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    return f"{type(value).__module__}.{type(value).__name__}"


def altered() -> Iterator[str]:
    """Names in vLLM's loaded modules, and in their classes and containers, that hold something of the package's."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "vllm":
            continue
        for name, value in list(vars(module).items()):
            if is_packages(value):
                yield f"{module_name}.{name}"
            elif isinstance(value, type) and value.__module__ == module_name:
                for attribute, member in list(vars(value).items()):
                    if is_packages(member):
                        yield f"{module_name}.{name}.{attribute}"
            elif type(value) in (list, tuple, set, frozenset, dict):
                members = value.values() if type(value) is dict else value
                yield from (f"{module_name}.{name}[{member}]" for member in members if is_packages(member))


def is_packages(value: Any) -> bool:
    if isinstance(value, type):
        return value.__module__.partition(".")[0] == PACKAGE
    return where(value).startswith(FILES)


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """Count calls of the package's functions during the block, by file and function.

    Sees this thread, and those started after `main` called ``threading.setprofile``.
    """
    global _recording
    calls: Counter[str] = Counter()
    _calls.clear()
    _recording = True
    sys.setprofile(_note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        _recording = False
        calls.update(_calls)


def _note(frame: FrameType, event: str, arg: object) -> None:
    code = frame.f_code
    if _recording and event == "call" and code.co_filename.startswith(FILES):
        _calls[f"{code.co_filename.removeprefix(FILES)}:{code.co_name}"] += 1


def main(out: str) -> None:
    threading.setprofile(_note)
    with tempfile.TemporaryDirectory() as folder:
        seen = observe(Path(folder))
    Path(out).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
