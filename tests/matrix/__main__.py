"""``python -m tests.matrix TABLE RELEASE...``: drive releases, write the Markdown table, fail if a cell is not as it
should be."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .releases import Results, faults, make_models, run, table


def main(table_file: str, *names: str) -> int:
    by_release: dict[str, Results] = {}
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        for release in names:
            start = time.monotonic()
            try:
                results = by_release[release] = run(release, Path(folder))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                found = [str(error)]
            else:
                found = faults(results)
            bad += [f"{release}, {fault}" for fault in found]
            print(f"{release}: {'as it should be' if not found else f'faults: {len(found)}'}", end="", flush=True)
            print(f", {time.monotonic() - start:.0f} s")
    text = table(by_release)
    Path(table_file).write_text(text)
    print(f"\n{text}")
    for fault in bad[:20]:
        print(f"FAULT {fault}"[:300].splitlines()[0])
    Path(table_file).with_suffix(".faults").write_text("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
