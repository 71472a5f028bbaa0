"""Merge what `--record-durations` recorded into durations.json, for `nox -s durations`.

The file has the CPU seconds of all cases of each test function, once for each kind of run (with
PyTorch's native interceptor, and in pure Python).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DURATIONS = Path(__file__).with_name("durations.json")
ROOT = Path(__file__).resolve().parents[2]


def merge(folder: Path) -> None:
    """Merge the figures of the runs in a folder into durations.json; those of other tests
    are kept.
    """
    measured: dict[str, dict[str, list[float]]] = {}
    for path in sorted(folder.iterdir()):
        for file, functions in json.loads(path.read_text()).items():
            for function, seconds in functions.items():
                measured.setdefault(file, {}).setdefault(function, []).append(round(seconds, 2))
    known = json.loads(DURATIONS.read_text())
    merged = {
        file: {**known.get(file, {}), **measured.get(file, {})}
        for file in {*known, *measured}
        if (ROOT / file).exists()
    }
    lines = [
        f"{json.dumps(file)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {found}" for name, found in sorted(functions.items()))
        + "\n}"
        for file, functions in sorted(merged.items())
    ]
    DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    merge(Path(sys.argv[1]))
