"""Count the instructions that instrumentation adds to one of two ranks of DistributedDataParallel.

The first rank runs inside valgrind, the second one beside it, and both do the same. Only the thread
of the program counts, since those of gloo wait in loops. Prints the counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from .bench_callgrind import count, counted, run
from .bench_growth import PLAIN
from .bench_models import SUBJECTS
from .bench_timing import Way
from .bench_tools import ways

WARM, COUNTED, WAYS = 12, 4, 3


def main() -> None:
    """Count and print."""
    run(argparse.ArgumentParser(description=__doc__), run_inside, show)


def show(_: argparse.Namespace) -> None:
    """Count in valgrind and print."""
    counts = count(__file__, options=["--separate-threads=yes"])
    plain = counts[PLAIN] / COUNTED
    print(f"one step of one rank, plain: {plain / 1e6:.2f} million instructions")
    for name, instructions in counts.items():
        print(f"{name}: {instructions / COUNTED / plain:.4f}")


def run_inside(library: Path, names: list[str]) -> None:
    """Run one of the ranks. That inside valgrind starts the other one."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": names[1] if names else "29555"}
    rank, other = int(bool(names)), None
    if not rank:
        command = [sys.executable, "-m", f"{__package__}.{Path(__file__).stem}", "--inside"]
        other = subprocess.Popen([*command, str(library), "1", os.environ["MASTER_PORT"]])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    program = SUBJECTS[0].program(True)
    program.model = torch.nn.parallel.DistributedDataParallel(program.model)
    for way in [
        Way(PLAIN, program),
        *ways("native", program, SUBJECTS[0].counted)[:WAYS],
        Way(f"{PLAIN}, after `apply`", program),
    ]:
        counted(library, way.name, way.run, way.enter(), WARM, COUNTED)
    if other is not None:
        other.wait()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may abort a process that ends (pytorch/pytorch#179291).


if __name__ == "__main__":
    main()
