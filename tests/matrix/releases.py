"""Run the driver on one release, and judge and show what it saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers.utils import logging as hf_logging

from tests.support.checkpoints import make_adapter, make_checkpoint

from . import CONTROLS, EQUAL, FAMILIES, NO_SUCH_PATH, PATHS

Results = dict[str, dict[str, str]]
ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / ".venvs" / "matrix"


def made() -> list[str]:
    """The releases whose folders ``make matrix`` has made."""
    stamps = FOLDERS.glob("*/.made")
    return sorted((stamp.parent.name for stamp in stamps), key=lambda name: [int(part) for part in name.split(".")])


def make_models(folder: Path) -> None:
    """Write checkpoint and adapters of every family; here and not in the driver, whose transformers may be older."""
    hf_logging.disable_progress_bar()
    for family in FAMILIES:
        checkpoint = make_checkpoint(folder / family / "model", family)
        config_file = checkpoint / "config.json"
        config = json.loads(config_file.read_text())
        if family == "qwen3_moe":
            config["num_experts"] = config["num_local_experts"]  # as it was called before transformers 5
        config_file.write_text(json.dumps(config))
        for number in (1, 2):
            make_adapter(folder / family / f"adapter{number}", checkpoint, seed=number)


def run(release: str, models: Path, timeout: float = 300) -> Results:
    """Drive `release` in a fresh process.

    Raises:
        RuntimeError: it failed before it could report; the message ends with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log.txt")
        command = [sys.executable, "-m", "tests.matrix.drive", str(models), str(out)]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(FOLDERS / release), str(ROOT)))}
        with log.open("wb") as sink:
            subprocess.run(command, env=environ, cwd=ROOT, stdout=sink, stderr=sink, timeout=timeout, check=False)
        if not out.exists():
            raise RuntimeError(f"vLLM {release} cannot be driven\n{log.read_text(errors='replace')[-6000:]}")
        results: Results = json.loads(out.read_text())
        return results


def faults(results: Results) -> list[str]:
    """Paths that do not give equal bytes, and controls that do or could not be tried."""
    bad: list[str] = []
    for family, row in results.items():
        bad += [f"{family}, {path}: {row[path]}" for path in PATHS if not row[path].startswith((EQUAL, NO_SUCH_PATH))]
        for control in CONTROLS:
            must_fail = control != "no view" or family == "minicpm"
            if (row[control] == EQUAL and must_fail) or row[control].startswith("NOT BUILT"):
                bad.append(f"{family}, {control}: {row[control]}")
    return bad


def _cell(results: Results, column: str) -> str:
    by_result: dict[str, list[str]] = {}
    for family, row in results.items():
        kind = row[column].partition(":")[0].lower()
        by_result.setdefault(kind, []).append(family)
    if len(by_result) == 1:
        return next(iter(by_result))
    return "; ".join(f"{kind}: {', '.join(families)}" for kind, families in by_result.items())


def table(by_release: dict[str, Results]) -> str:
    """A Markdown table of release by path, and what its columns are."""
    columns = [*PATHS, *CONTROLS]
    lines = ["| " + " | ".join(["vLLM", *columns]) + " |", "| " + " | ".join(["---"] * (len(columns) + 1)) + " |"]
    for release, results in by_release.items():
        lines.append("| " + " | ".join([release, *(_cell(results, column) for column in columns)]) + " |")
    lines += ["", f"Models: {', '.join(FAMILIES)}; a cell that names none is about all of them.", ""]
    lines += [f"- *{name}*: {what}" for name, what in PATHS.items()]
    lines += [f"- *{name}* (control): {what}" for name, what in CONTROLS.items()]
    return "\n".join(lines) + "\n"
