"""All benchmarks whose pages `nox -s bench` writes, each in a process of its own.

Arguments such as `--quick` go to each.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAMS = [
    "start_bench",
    "bench",
    "instructions_bench",
    "compiled_bench",
    "operators_bench",
    "tools_bench",
    "peers_bench",
    "tensorflow_bench",
    "profilers_bench",
]


def main(arguments: list[str]) -> int:
    """Run the benchmarks to the first that fails; return its status."""
    for program in PROGRAMS:
        command = [sys.executable, "-m", f"{__package__}.{program}", *arguments]
        print(f"$ {' '.join(command)}", flush=True)
        if status := subprocess.run(command).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
