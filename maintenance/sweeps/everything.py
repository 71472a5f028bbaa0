"""All parts of the sweep, each in a process of its own, and then the page: `nox -s sweep`.

With arguments, only the part that they say.
"""

from __future__ import annotations

import subprocess
import sys

# Frameworks, and modes of them, that the sweep makes faults in.
FAULTY = ("torch", "tensorflow", "tensorflow-function", "tensorflow-graph")
PARTS = [
    ["operators"],
    ["models"],
    ["programs"],
    ["programs", "--framework", "tensorflow"],
    ["random"],
    ["long"],
    ["exceptions"],
    *(["faults", "--framework", framework] for framework in FAULTY),
]


def main(arguments: list[str]) -> int:
    """Run parts and write the page; return 1 if anything is unexplained, in whatever part."""
    command = [sys.executable, "-m", "maintenance.sweeps"]
    for part in [arguments] if arguments else PARTS:
        status = subprocess.run([*command, *part]).returncode
        if status not in (0, 1):
            return status
    return subprocess.run([*command, "report"]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
