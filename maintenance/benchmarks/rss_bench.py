"""Resident memory over many training steps under each tool, as a table in Markdown.

`python -m maintenance.benchmarks.rss_bench [--steps 20000] [TOOL ...]` runs each tool in a process
of its own and prints the table. Memory that grows with the steps is a leak: of the tool, unless it
keeps what it saw by purpose.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

#: Parts of the run after which memory is read. Before the first one, caches fill.
PARTS = (0.05, 0.25, 0.5, 0.75, 1.0)
#: Arguments of tools that need some.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "capture": {"ops": ["relu"]},
    "prune": {"sparsity": 0.5},
    "prune_tiles": {"sparsity": 0.5},
}
TOOLS = ("plain", *sorted(point.name for point in entry_points(group="amanda.tools")))


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(name: str, steps: int) -> list[float]:
    """Train a small model under a tool, and return the resident memory after each part."""
    import torch
    from torch import nn

    import amanda

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    tools = []
    if name != "plain":
        (point,) = (p for p in entry_points(group="amanda.tools") if p.name == name)
        tools.append(point.load()(**ARGUMENTS.get(name, {})))
    found: list[float] = []
    with amanda.apply(*tools):
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step in {round(part * steps) for part in PARTS}:
                found.append(resident())
    return found


def main() -> None:
    """Measure the tools, each in its own process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", default=list(TOOLS))
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--here", action="store_true", help="measure one tool in this process")
    options = parser.parse_args()
    if options.here:
        print(*(f"{value:.1f}" for value in measure(options.tools[0], options.steps)))
        return
    print("| tool |", " | ".join(f"{round(p * options.steps):,} steps" for p in PARTS), "|")
    print("|---|" + "---|" * len(PARTS))
    for name in options.tools:
        command = [sys.executable, "-m", __spec__.name, name, "--steps", str(options.steps)]
        with tempfile.TemporaryDirectory() as folder:
            run = subprocess.run(
                [*command, "--here"],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "AMANDA_OUTPUT": folder},
            )
        shown = run.stdout.split() if run.returncode == 0 else [run.stderr.splitlines()[-1]]
        print(f"| `{name}` |", " | ".join(shown), "|", flush=True)


if __name__ == "__main__":
    main()
