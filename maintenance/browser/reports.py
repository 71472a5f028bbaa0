"""Makes the reports of the programs in docs/screenshots under every tool."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["PICTURED", "PROGRAMS", "RUNS", "make", "make_all"]

PROGRAMS = Path(__file__).resolve().parents[2] / "docs/screenshots"
#: The tools on the pictures of README and guides.
PICTURED = ("latency", "memory", "flops", "graph")
#: Name of a page -> tools that run together. Of tools that replace the same operators, each has a
#: page of its own.
RUNS: dict[str, tuple[str, ...]] = {
    "costs": (*PICTURED, "summary", "trace"),
    "values": (
        "sparsity",
        "nonfinite:norms=true",
        "fingerprint",
        "replicas",
        "sensitivity",
        "capture:modules=*pooler*",
        "dump:stats=true",
        "effective_path:limit=2",
    ),
    "edits": (
        "prune:sparsity=0.5",
        "quantize",
        "inject_faults",
        "steer:edit=scale,modules=*pooler*,factor=0.5",
    ),
    "memory": ("prune_nm", "rematerialize"),
    "channels": ("prune_channels",),
    "rewritten": ("rewrite:rules=conv_bn",),
    "tiles": ("prune_tiles:sparsity=0.5", "prune_positions", "prune_attention"),
}


def make(program: str, tools: Iterable[str], page: Path) -> Path:
    """Run a program under tools; return its report."""
    options = [option for tool in tools for option in ("-t", tool)]
    command = [sys.executable, "-m", "amanda", "run", "-q", *options]
    command += ["-o", str(page.with_suffix("")), "--html", str(page), f"{program}.py"]
    subprocess.run(command, cwd=PROGRAMS, check=True)
    return page


def make_all(folder: Path) -> list[Path]:
    """Make a page of each run of each program, but those that are there; return them, with the
    pages of graphs.
    """
    pages = []
    for program in sorted(PROGRAMS.glob("*.py")):
        for name, tools in RUNS.items():
            page = folder.resolve() / f"{program.stem}-{name}.html"
            if not page.exists():
                print(f"{program.name} under {', '.join(tools)}", flush=True)
                make(program.stem, tools, page)
            pages.append(page)
        pages.append(folder.resolve() / f"{program.stem}-costs/graph/graph.html")
    return pages
