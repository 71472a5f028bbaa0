"""Running a driver's self-test in another process, so that a crash does not end the program.

Owns the process and how its end is described.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["run", "write_quietly"]

#: Seconds after which a self-test is stopped. Importing the framework takes most of its time.
_PATIENCE = 300


def run(module: str, settings: Mapping[str, str]) -> tuple[str, bool]:
    """Run the self-test of a driver; return why it failed, or "", and whether that is final.

    Args:
        module: The module to run.
        settings: Environment variables, such as the choice of the interceptor.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AMANDA_")},
        **settings,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONSAFEPATH": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {_PATIENCE} seconds", False
    except (OSError, ValueError) as error:
        return f"it could not be started ({error})", False
    if done.returncode == 0:
        return "", True
    if done.returncode < 0:
        return f"it was ended by {_signal_name(-done.returncode)}", True
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return (lines[-1].strip() if lines else f"it exited with {done.returncode}"), True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def write_quietly(path: Path, text: str) -> None:
    """Write a file completely, or not at all if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False
        ) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        pass
