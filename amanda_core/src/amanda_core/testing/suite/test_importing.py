"""A framework that is imported while tools are applied, in a process of its own."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

from amanda_core.testing.kit.capabilities import needs
from amanda_core.testing.kit.rig import Rig


@needs(optional=True)
def test_a_framework_that_is_imported_under_tools_is_instrumented(rig: Rig) -> None:
    """Attach when `amanda_attach` is called again, after the framework's import."""
    backend = type(rig.backend)
    if not rig.backend.is_installed:
        pytest.skip(f"the driver of {rig.backend.title} is not installed")
    command = [sys.executable, "-m", "amanda_core.testing.kit.importing"]
    done = subprocess.run(
        [*command, inspect.getfile(backend), backend.__qualname__],
        input=json.dumps(sys.path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "instrumented"
