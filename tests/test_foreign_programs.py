"""Programs of other libraries and of torch's own machinery, under tools: those that run fast.

`nox -s sweep -- programs` runs all, among them those of several processes and of compilers.
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

#: By name, as in sweeps/foreign_programs.
FAST = [
    "lightning: fit, validate, checkpoint",
    "accelerate: prepare, accumulate, clip, save",
    "data loader: 2 workers by fork",
    "autocast and GradScaler",
    "gradient checkpointing: use_reentrant=False",
    "gradient checkpointing: use_reentrant=True",
    "compiled parts: eager",
    "export, save, load, run",
    "jit: script, trace, save, load",
    "fx: symbolic trace, transform, run",
    "fake tensors, meta device",
    "torch.func: grad, vmap, jacrev, hessian",
    "torch.func: functional_call, ensembles, per-sample gradients",
    "pickle, deepcopy, save, load",
    "hooks of the user's",
    "torch.profiler",
    "modes of the user's",
    "autograd.Function, double backward, gradient penalty",
    "closures: LBFGS; averaged weights; schedules",
    "parametrizations and pruning",
    "exceptions in the program, generators, threads",
    "save_on_cpu, no_grad, inference_mode, set_grad_enabled",
]


def run(path: Path, *names: str, code: str = "") -> Any:
    """Run programs in one process of their own, since one may leave things; what came of them."""
    start = f"{code}\nimport sys\nfrom sweeps.foreign import main\nmain(*sys.argv[1:])"
    # The package lies in the root, which `-P` would hide.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, "-c", start, str(path), *names]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("programs") / "found.json", *FAST)


@pytest.mark.parametrize("name", FAST)
def test_program_is_the_same_under_tools(name: str, found: Any) -> None:
    if "is not installed" in found["left_out"].get(name, ""):
        pytest.skip(found["left_out"][name])
    assert name not in found["left_out"]
    wrong = [f for f in found["failures"] if f["case"] == name and not f["reason"]]
    assert wrong == []
    assert found["cases"][name] == 8


MISCOUNTS = """
import sweeps.foreign as foreign
foreign.Count.analyse = lambda self, context: None
"""


def test_wrong_counts_are_noticed(tmp_path: Path) -> None:
    name = "save_on_cpu, no_grad, inference_mode, set_grad_enabled"
    found = run(tmp_path / "found.json", name, code=MISCOUNTS)
    assert {failure["how"] for failure in found["failures"]} == {
        "native, count",
        "function_mode, count",
    }
