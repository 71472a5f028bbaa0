"""The rows of one environment in docs/backends.md and docs/tools/matrix.md: `nox -s backends`.

`python -m maintenance.backends NAME` runs in the environment whose name is given: that of a driver,
or `shared`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The conformance kit over the drivers of the shared environment.
KITS = [
    "tests/seam/conformance/test_torch.py",
    "tests/portable/test_conformance.py",
    "amanda_driver_onnxruntime/tests/test_conformance.py",
]


def main(name: str) -> None:
    """Run the tools and the kit, and write the page; whatever fails ends the program."""
    results = Path(__file__).with_name("results") / f"{name}.json"
    run(sys.executable, "-m", f"{__package__}.one_tool", str(results))
    run(sys.executable, "-m", f"{__package__}.tool_matrix", name)
    if name == "shared":
        run(
            *(sys.executable, "-m", f"{__package__}.tool_matrix", "in_python"),
            AMANDA_TORCH_INTERCEPTOR="function_mode",
        )
    pytest = str(Path(sys.executable).with_name("pytest"))
    with tempfile.TemporaryDirectory() as folder:
        reports = []
        # TensorFlow's tests have a process of their own.
        for number, suite in enumerate(KITS if name == "shared" else [kit_of(name)]):
            reports.append(f"{folder}/{number}.json")
            plugin = ("-p", "amanda_core.testing.plugin", f"--amanda-report={reports[-1]}")
            run(pytest, "-q", *plugin, suite, PYTHONSAFEPATH="1")
        run(sys.executable, "-m", f"{__package__}.pages", name, *reports)


def kit_of(driver: str) -> str:
    """Return the file of the conformance kit over a driver with an environment of its own."""
    return f"{driver}/tests/test_conformance.py"


def run(*command: str, **env: str) -> None:
    """Run a program in the root, which must succeed."""
    print(f"$ {' '.join(command)}", flush=True)
    subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, check=True)


if __name__ == "__main__":
    main(sys.argv[1])
