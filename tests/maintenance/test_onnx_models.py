"""A sample of the models of ONNX under tools, and of faults in exported models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, *arguments: str) -> tuple[int, str]:
    # The package lies in the root, which `-P` would hide.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


MAIN = "from maintenance.sweeps.onnx_models.__main__ import main\nraise SystemExit(main())"


def test_faults_are_named_and_models_keep_their_bits() -> None:
    status, output = run(MAIN, "--only", "DistilBERT")
    assert status == 0, output
    assert output.count("| equal | equal | equal, 12 weights |") == 1
    assert output.count("\n") == 1 + 1 + 14  # The model, no fault, and the faults.


def test_the_sweep_can_fail() -> None:
    wrong = (
        "from amanda_driver_onnxruntime.execution.parts import Parts\n"
        "from amanda_driver_onnxruntime.onnxruntime_internals.values import array_of\n"
        "original = Parts.run_node\n"
        "Parts.run_node = lambda *args: [array_of(one) + 1 for one in original(*args)]\n"
    )
    status, output = run(wrong + MAIN, "--only", "own operators", "--no-faults")
    assert status == 1
    assert "FAILED" in output
