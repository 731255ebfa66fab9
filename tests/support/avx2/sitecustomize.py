"""With this folder on ``PYTHONPATH``, vLLM takes the CPU for one with AVX2 and without AVX-512.

Its wheel for x86 brings one library of operators for each kind of CPU, and asks torch which one to load. What is asked
for here does not import torch: programs that do without it stay as they are.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import Any


def answer_no(torch_cpu: Any) -> None:
    torch_cpu._is_avx512_supported = torch_cpu._is_avx512_bf16_supported = lambda: False


class AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            answer_no(module)

        vars(spec.loader)["exec_module"] = exec_module
        return spec


if "torch.cpu" in sys.modules:
    answer_no(sys.modules["torch.cpu"])
else:
    sys.meta_path.insert(0, AfterImport())
