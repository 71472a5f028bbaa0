"""A sample of the sweep, of fixed size and seed: nothing unexplained, and it can fail.

`nox -s sweep` runs all of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: Ops whose gradients, views or layouts once differed.
ONCE_WRONG = ["squeeze float32", "atleast_2d complex64", "split.list_args float32"]


def sweep(folder: Path, *arguments: str, code: str = "") -> tuple[int, str, dict[str, Any]]:
    """Run a part in a process of its own, since a fault may leave things; its result."""
    start = ["-c", f"{code}\nfrom sweeps.__main__ import main\nraise SystemExit(main())"]
    # The package lies in the root, which `-P` would hide.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    env.pop("AMANDA_TORCH_INTERCEPTOR", None)
    done = subprocess.run(
        [sys.executable, *start, *arguments, "--output", str(folder)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    (path,) = folder.glob("*.json")
    return done.returncode, done.stdout + done.stderr, json.loads(path.read_text())


def test_a_sample_of_operators(tmp_path: Path) -> None:
    status, output, found = sweep(
        tmp_path, "operators", "--sample", "24", "--seed", "7", "--inputs", "1"
    )
    assert status == 0, output
    assert found["counts"]["instrumented runs"] > 300
    assert found["counts"]["routines called"] > 2000


@pytest.mark.parametrize("case", ONCE_WRONG)
def test_operators_that_were_wrong(tmp_path: Path, case: str) -> None:
    status, output, found = sweep(tmp_path, "operators", "--only", case, "--inputs", "2")
    assert status == 0, output
    assert found["cases"][case] > 0


def test_faults(tmp_path: Path) -> None:
    status, output, found = sweep(tmp_path, "faults", "--sample", "8", "--seed", "7")
    assert status == 0, output
    assert sum(found["cases"].values()) > 100


CHANGES = """
import sweeps.identity
sweeps.identity.ROUTINES["none"] = lambda *values: tuple(
    v * 1.0001 if getattr(v, "is_floating_point", bool)() else v for v in values
)
"""
LEAVES = """
import amanda_core.activation as activation
import torch
close = activation._Stack.close
def forgetful(self):
    close(self)
    torch.nn.functional.silu = lambda *a: None
activation._Stack.close = forgetful
"""


def test_it_notices_a_changed_bit(tmp_path: Path) -> None:
    status, output, found = sweep(
        tmp_path, "operators", "--only", "tanh float32", "--inputs", "1", code=CHANGES
    )
    assert status == 1, output
    assert {failure["how"].split(", ")[2][:4] for failure in found["failures"]} == {"none"}


def test_it_notices_what_is_left(tmp_path: Path) -> None:
    status, output, found = sweep(tmp_path, "faults", "--only", "garbage", code=LEAVES)
    assert status == 1, output
    assert "left: torch.nn.functional.silu" in found["failures"][0]["what"]
