"""Walks the architectures of one or more releases and writes what was seen.

    python -m tests.models.walk --release-table docs/models.md   # both tested releases, side by side
    python -m tests.models.walk --update                         # rewrite expected.json too
    python -m tests.models.walk --only LlamaForCausalLM          # print rows, with tracebacks

The walking is done by `tests.models.worker` in the release's own environment, many architectures a process; where a
process dies or hangs, the architecture it was at is noted and a new one goes on with the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RELEASES = ("0.27.1", "0.32.0")
EXPECTED = Path(__file__).with_name("expected.json")
PATIENCE = 60  # seconds without a new row
Row = dict[str, Any]

GROUPS = {
    "import": "the model file cannot be imported here",
    "config": "no small config could be made",
    "engine config": "the config was not accepted (mostly configs of remote code, or a processor is needed)",
    "construct": "the model could not be constructed (config of remote code, or no CPU layer)",
    "checkpoint": "no checkpoint could be made",
    "process": "weights could not be processed on the CPU",
    "wrap": "vLLM could not wrap it for LoRA",
    "crash": "the process died or hung",
}


def python_of(release: str) -> str:
    return str(ROOT / ".venvs" / release / "bin" / "python")


def _worker(python: str, command: str, out: Path, *names: str) -> None:
    """Run until it ends or has written nothing for `PATIENCE` seconds."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    process = subprocess.Popen(
        [python, "-m", "tests.models.worker", command, str(out), *names],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    size, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = out.stat().st_size if out.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            process.kill()
    process.wait()


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def walk(python: str = sys.executable, only: list[str] | None = None) -> dict[str, Row]:
    """A row for every architecture of the release of `python`. See `verdict` and `stock_verdict`."""
    with tempfile.TemporaryDirectory() as folder:
        listing, out = Path(folder, "list.jsonl"), Path(folder, "rows.jsonl")
        _worker(python, "list", listing)
        names = [name for name, _ in _lines(listing) if not only or name in only]
        rows: dict[str, Row] = {}
        while todo := [name for name in names if name not in rows]:
            _worker(python, "walk", out, *todo)
            rows |= {row["architecture"]: row for row in _lines(out)}
            if todo[-1] not in rows:  # it died, or was killed, at the first one without a row
                stuck = next(name for name in todo if name not in rows)
                rows[stuck] = dict(architecture=stuck, group="crash", reason="the process died or hung", seconds=0)
    if not rows:
        raise RuntimeError(f"{python} listed no architectures")
    return rows


def verdict(row: Row) -> str:
    """What came of the reload with this package, or the group of reasons why it was not tried.

    From tensors handed over, from disk and from a snapshot; if they differ, what is not exact.

    ``exact``: every tensor is as before. ``refused``, ``silent``: not so, but neither with vLLM alone and LoRA off;
    requests are then refused, or not. ``raises`` (or a failed load left the model torn), ``differs``: not so because
    of LoRA. ``false alarm``: all is well, but requests are refused.
    """
    if "ours" not in row:
        return str(row["group"])
    found = [_verdict(row[way], row.get("plain", {})) for way in ("ours", "disk", "snapshot") if way in row]
    return next((one for one in found if one != "exact"), "exact")


def _verdict(seen: dict[str, Any], plain: dict[str, Any]) -> str:
    if "error" in seen:
        survived = seen["refuses"] and not seen["meta"] and not seen["rewrapped"]
        return "refused" if "error" in plain and survived else "raises"
    rest = ("lora", "moved", "rewrapped")
    if not seen["base"] and not seen["unnamed"] and not any(seen[key] for key in rest):
        return "false alarm" if seen["refuses"] else "exact"
    base = {name.replace(".base_layer.", ".") for name in seen["base"]}
    also_plain = base <= set(plain.get("base", ())) and len(seen["unnamed"]) <= len(plain.get("unnamed", ()))
    if any(seen[key] for key in rest) or not also_plain:
        return "differs"
    return "refused" if seen["refuses"] else "silent"


def way_verdict(row: Row, way: str) -> str:
    """What came of ``disk`` or ``snapshot``, and who brought the weights back."""
    if way not in row:
        return ""
    seen = row[way]
    rest = (seen.get("plan") or {}).get("rest")
    by = {None: "loader", "checkpoint": f"plan, {rest} by the loader" if rest else "plan"}
    how = by.get(seen.get("restored"), seen.get("restored"))
    return f"{_verdict(seen, row.get('plain', {}))} ({how})"


def stock_verdict(row: Row) -> str:
    """``raises``, ``base wrong``, ``adapters lost`` or ``exact``; empty where it was not tried."""
    seen = row.get("stock")
    if seen is None:
        return ""
    if "error" in seen:
        return "raises"
    if seen["base"] or seen["unnamed"]:
        return "base wrong"
    return "adapters lost" if seen["lora"] else "exact"


BUILT = ("exact", "refused", "silent", "raises", "differs", "false alarm")
BAD = ("raises", "differs", "false alarm")


def summary(release: str, rows: dict[str, Row]) -> str:
    counts = Counter(verdict(row) for row in rows.values())
    stock = Counter(stock_verdict(row) for row in rows.values())
    built = sum(counts[name] for name in BUILT)
    lines = [
        f"**{release}**: {len(rows)} architectures with LoRA support, {built} built. With this package "
        f"{counts['exact']} reload exactly; {counts['refused'] + counts['silent']} are wrong also with LoRA off, of "
        f"which {counts['refused']} are then refused; {sum(counts[name] for name in BAD)} are wrong because of LoRA. "
        f"Without it {stock['raises']} reloads raise, {stock['base wrong']} leave base weights wrong, "
        f"{stock['adapters lost']} lose LoRA state, {stock['exact']} are exact. Not built: {len(rows) - built}:",
        "",
    ]
    ways = [(way_verdict(row, "disk"), way_verdict(row, "snapshot")) for row in rows.values()]
    lines.insert(
        1,
        f"From disk, {sum('exact (plan' in disk for disk, _ in ways)} come back exactly by the plan of the first load; "
        f"from a snapshot {sum('exact (snapshot)' in snapshot for _, snapshot in ways)}.\n",
    )
    lines += [f"- {counts[group]}: {text}" for group, text in GROUPS.items() if counts[group]]
    return "\n".join(lines)


def _remark(row: Row | None) -> str:
    if row is None:
        return ""
    if "ours" not in row:
        return f"{row['group']}: {row['reason']}"
    seen = row["ours"]
    if "error" in seen:
        return str(seen["error"])
    differ = [*seen["base"], *seen["lora"], *(f"{size} bytes without a name" for size in seen["unnamed"])]
    if differ:
        return f"{len(differ)} tensors, first `{differ[0]}`"
    return str(seen["refuses"] or "")


def _cell(text: str, width: int = 140) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    text = text.replace(str(ROOT), "").replace(tempfile.gettempdir(), "")
    return text if len(text) <= width else text[: width - 1] + "…"


def table(results: dict[str, dict[str, Row]]) -> str:
    """The text of ``docs/models.md``."""
    head = ["architecture", "model file"]
    for release in results:
        head += [
            f"{release} loads by",
            f"{release} stock",
            f"{release} with",
            f"{release} from disk",
            f"{release} snapshot",
        ]
    head.append("remark")
    lines = [
        "# Models",
        "",
        "Every architecture in vLLM's registry whose class supports LoRA (draft models aside: vLLM never wraps them), "
        "at the smallest size that its config allows, with random weights, built and loaded on the CPU by the "
        "release's own loader, wrapped for LoRA with one adapter; towers too where the model can. No forward pass. "
        "MoE and MLA layers are those that a GPU would get. Then everything allocated while loading is overwritten, "
        "buffers are restored as vLLM's wake-up does, and weights are reloaded through `reload_weights`, with tensors "
        "handed over. *stock*: vLLM alone. *with*: this package. *from disk*: this package, `reload_weights()`, and "
        "whether the plan of the first load or vLLM's loader brought the weights. *snapshot*: this package, nothing "
        "but the wake-up. `exact`: all tensors have the bytes "
        "they had. `refused`, `silent`: "
        "not so, but neither when vLLM reloads the model with LoRA off; this package then refuses requests, or does "
        "not notice. `raises`, `differs`, `false alarm`: its faults.",
        "",
        "Made by `make models`.",
        "",
        *(line for release, rows in results.items() for line in (summary(release, rows), "")),
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
    ]
    names = sorted({name for rows in results.values() for name in rows})
    for name in names:
        found = [rows.get(name) for rows in results.values()]
        file = next((row["file"] for row in found if row and "file" in row), "")
        cells = [name, file.removeprefix("vllm.model_executor.models.")]
        for row in found:
            shown = ["-"] * 5
            if row is not None:
                ways = [way_verdict(row, way) for way in ("disk", "snapshot")]
                shown = [row.get("loads", ""), stock_verdict(row), _verdict_cell(row), *ways]
            cells += shown
        remarks = dict.fromkeys(filter(None, map(_remark, found)))
        lines.append("| " + " | ".join(_cell(cell) for cell in [*cells, "; ".join(remarks)]) + " |")
    return "\n".join(lines) + "\n"


def _verdict_cell(row: Row) -> str:
    return _verdict(row["ours"], row.get("plain", {})) if "ours" in row else "not built"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--release-table", type=Path, help="write the table of all releases here")
    parser.add_argument("--update", action="store_true", help="rewrite expected.json from what is seen")
    parser.add_argument("--releases", nargs="*", default=RELEASES)
    parser.add_argument("--only", nargs="*", help="architectures")
    parser.add_argument("--rows", type=Path, help="write the rows as JSON here")
    args = parser.parse_args()
    results: dict[str, dict[str, Row]] = {}
    for release in args.releases:
        start = time.monotonic()
        results[release] = walk(python_of(release), args.only)
        print(summary(release, results[release]), f"\n{time.monotonic() - start:.0f} s\n", flush=True)
    if args.rows:
        args.rows.write_text(json.dumps(results, indent=1))
    if args.update:
        expected = {
            release: {name: verdict(row) for name, row in sorted(rows.items())} for release, rows in results.items()
        }
        known = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
        for release, verdicts in expected.items():
            known[release] = (known.get(release, {}) if args.only else {}) | verdicts
        EXPECTED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    if args.release_table:
        args.release_table.write_text(table(results))
    for rows in results.values():
        for name, row in rows.items():
            if args.only:
                print(json.dumps(row, indent=1).replace("\\n", "\n"))
            elif verdict(row) in (*BAD, "silent", "refused"):
                print(name, verdict(row), _remark(row))


if __name__ == "__main__":
    main()
