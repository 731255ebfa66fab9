"""The command ``vllm-lora-reload``. Help needs neither torch nor vLLM, and comes at once."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .settings import KEY, PREFIXES, in_config

PROG = "vllm-lora-reload"
ROOT = Path(__file__).parents[1]  # of a source tree
_SNAPSHOT_DIRS = [f"{prefix}SNAPSHOT_DIR" for prefix in PREFIXES]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        The exit status: 0, 1 for a problem that it found, 2 if it cannot run at all.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command == "doctor":
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return doctor(args)
    if args.command == "snapshot":
        return snapshot(args, rest)
    return from_source_tree(args.command, args.module, rest)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROG, description="LoRA that survives vLLM's sleep, wake-up and weight reload.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    doctor = commands.add_parser("doctor", help="look for what keeps this package from working here")
    doctor.add_argument("--snapshot-dir", type=Path, metavar="DIR", help=f"default: ${_SNAPSHOT_DIRS[0]}")
    doctor.add_argument("--verify", action="store_true", help="read every snapshot and compare its digests")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")

    snapshot = commands.add_parser(
        "snapshot",
        help="write a model's snapshots, one for each rank, before an engine needs them",
        usage=f"{PROG} snapshot MODEL --snapshot-dir DIR [engine arguments]",
        description="Start an engine with LoRA, have every rank write its snapshot, and stop. It is for engines with "
        "the same MODEL (as it is spelt), dtype, quantization, parallel sizes and vLLM release.",
        epilog="Engine arguments are those of `vllm serve --help=all`, --tensor-parallel-size 2 and the like. Add "
        "--enforce-eager to start sooner.",
        allow_abbrev=False,
    )
    snapshot.add_argument("--snapshot-dir", type=Path, metavar="DIR", help=f"default: ${_SNAPSHOT_DIRS[0]}")

    for name, module, text in (
        ("demo", "benchmarks.demo", "show sleep and reload with this package and without it"),
        ("bench", "benchmarks.all", "run all benchmarks"),
    ):
        command = commands.add_parser(name, help=f"{text} (source tree only)", add_help=False, allow_abbrev=False)
        command.set_defaults(module=module)
    return parser


def _snapshot_dir(args: argparse.Namespace) -> Path | None:
    given = args.snapshot_dir or next((os.environ[name] for name in _SNAPSHOT_DIRS if name in os.environ), None)
    return Path(given).expanduser().absolute() if given else None


def _complain(sentence: str) -> None:
    print(f"{PROG}: {sentence}", file=sys.stderr)


def _engine_installed() -> bool:
    missing = [name for name in ("torch", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        _complain(f"{' and '.join(missing)} cannot be found by {sys.executable}: use the environment that vLLM is in")
    return not missing


# --- doctor -------------------------------------------------------------------------------------------------------


def doctor(args: argparse.Namespace) -> int:
    """Print what `doctor.examine` finds, each row as it is found."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not _engine_installed():
        return 1
    from .doctor import examine

    out, found = sys.stdout, []
    with contextlib.redirect_stdout(sys.stderr):  # vLLM's log, which would spoil the JSON
        for check in examine(_snapshot_dir(args), args.verify):
            found.append(check)
            if not args.json:
                print(f"{check.status:<8} {check.name:<15} {check.detail}", file=out, flush=True)
    problems, warnings = (sum(check.status == status for check in found) for status in ("problem", "warning"))
    if args.json:
        print(json.dumps({"problems": problems, "warnings": warnings, "checks": [vars(check) for check in found]}))
    else:
        print(f"{problems or 'no'} problem{'s' * (problems != 1)}, {warnings or 'no'} warning{'s' * (warnings != 1)}")
    return 1 if problems else 0


# --- snapshot -----------------------------------------------------------------------------------------------------


def snapshot(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Start an engine, have every rank write its snapshot, and print what each did.

    Sleep mode is left as the engine arguments have it: it decides where memory comes from, not what is in it.
    """
    folder = _snapshot_dir(args)
    if folder is None:
        _complain("snapshot needs --snapshot-dir DIR")
        return 2
    if not _engine_installed():
        return 1
    select_plugin(os.environ)
    from . import seams

    try:
        arguments = seams.engine_arguments(rest, f"{PROG} snapshot")
        given = arguments.get("additional_config") or {}
        of_package = {**in_config(given), "snapshot_dir": str(folder)}
        arguments |= {"enable_lora": True, "additional_config": {**given, KEY: of_package}}
        engine = seams.offline_engine(**arguments)
        ranks = engine.collective_rpc("lora_reload_take_snapshot")
    except Exception as error:
        _complain(f"no snapshot was taken: {type(error).__name__}: {error}")
        return 1
    for rank, result in enumerate(ranks):
        print(f"rank {rank}: {in_words(result)}", flush=True)
    return 0 if all(result["state"] == "valid" for result in ranks) else 1


def select_plugin(environ: MutableMapping[str, str]) -> None:
    """Have vLLM load this package in all processes, beside the plugins that are selected. Unset, it selects all."""
    selected = environ.get("VLLM_PLUGINS")
    if selected is not None and KEY not in selected.split(","):
        environ["VLLM_PLUGINS"] = f"{selected},{KEY}" if selected else KEY


def in_words(result: dict[str, Any]) -> str:
    """What ``lora_reload_take_snapshot`` has returned for a rank."""
    if result["state"] != "valid":
        return f"NO SNAPSHOT: {result['reason']}"
    size = result["bytes"] / 1e9
    written = "was there already" if result["seconds"] is None else f"written at {size / result['seconds']:.2f} GB/s"
    return f"{result['path']}, {size:.4g} GB, {written}"


# --- demo and bench -----------------------------------------------------------------------------------------------


def from_source_tree(command: str, module: str, rest: Sequence[str]) -> int:
    """Run a module that is not installed, with the rest of the arguments."""
    if not ROOT.joinpath(*module.split(".")).with_suffix(".py").exists():
        _complain(f"`{command}` comes with the source tree: clone it and call `make env`, then run it from there")
        return 2
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # The folder that it is called from may have a package of that name too; from Python 3.11 on it is left out.
    environ = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    return subprocess.call([sys.executable, "-m", module, *rest], env=environ)


if __name__ == "__main__":
    sys.exit(main())
