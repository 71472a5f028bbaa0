"""Fast programs of other libraries and of torch's own features, under tools.

`nox -s sweep -- programs` runs all, including those with several processes and compilers.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from program_server import ProgramServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

#: By name, as in maintenance/sweeps/foreign_programs.
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


@pytest.fixture(scope="module")
def server() -> Iterator[ProgramServer]:
    """Provide a server that forks, because a program may leave something behind."""
    # The package lies in the root, which `-P` would hide.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    with ProgramServer("import torch", forks=True, cwd=ROOT, env=env) as server:
        yield server


def run(server: ProgramServer, path: Path, *names: str, code: str = "") -> Any:
    """Run programs in one process and return their results."""
    start = f"{code}\nimport sys\nfrom maintenance.sweeps.foreign import main\nmain(*sys.argv[1:])"
    server.check(start, path, *names)
    return json.loads(path.read_text())


#: Under the sweep's own tools alone, for the time that it takes.
OWN_TOOLS = """
import maintenance.sweeps.foreign as foreign
foreign.RUNS = [run for run in foreign.RUNS if run[1] not in foreign.WAYS]
"""
#: Under the shipped tools: programs that take no time.
UNDER_SHIPPED = [
    "autograd.Function, double backward, gradient penalty",
    "logging tensors and modes",
    "save_on_cpu, no_grad, inference_mode, set_grad_enabled",
]
SHIPPED_TOOLS = """
import maintenance.sweeps.foreign as foreign
ways = [run for run in foreign.RUNS if run[1] in foreign.WAYS]
foreign.RUNS = [*foreign.RUNS[:2], *ways]
"""


@pytest.fixture(scope="module")
def found(server: ProgramServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(server, tmp_path_factory.mktemp("programs") / "found.json", *FAST, code=OWN_TOOLS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAST)
def test_program_is_the_same_under_tools(name: str, found: Any) -> None:
    if "is not installed" in found["left_out"].get(name, ""):
        pytest.skip(found["left_out"][name])
    assert name not in found["left_out"]
    wrong = [f for f in found["failures"] if f["case"] == name and not f["reason"]]
    assert wrong == []
    assert found["cases"][name] == 8


@pytest.mark.slow
def test_programs_under_every_shipped_tool(server: ProgramServer, tmp_path: Path) -> None:
    found = run(server, tmp_path / "found.json", *UNDER_SHIPPED, code=SHIPPED_TOOLS)
    assert found["failures"] == []
    # All that look at once, and each that edits; with both interceptors.
    code = "from maintenance.sweeps.shipped import EDITING; print(1 + len(EDITING))"
    assert found["cases"] == dict.fromkeys(UNDER_SHIPPED, 2 * int(server.check(code)))


RAISES = """
from amanda_tools.flops import Flops
def analyse(self, context):
    raise ValueError("not of this op")
Flops.analyse = analyse
"""


def test_the_shipped_tool_that_fails_is_named(server: ProgramServer, tmp_path: Path) -> None:
    name = "save_on_cpu, no_grad, inference_mode, set_grad_enabled"
    found = run(server, tmp_path / "found.json", name, code=RAISES + SHIPPED_TOOLS)
    assert {failure["how"] for failure in found["failures"]} == {
        "native, tools",
        "function_mode, tools",
    }
    for failure in found["failures"]:
        assert "flops alone: raised 'ValueError: not of this op'" in failure["what"]


def test_every_shipped_tool_is_applied(server: ProgramServer) -> None:
    entry_points = importlib.metadata.entry_points(group="amanda.tools")
    shipped = {
        point.name for point in entry_points if point.dist and point.dist.name == "amanda-tools"
    }
    names = server.check("from maintenance.sweeps.shipped import SHIPPED; print(*SHIPPED)")
    assert set(names.split()) == shipped


#: A program of TensorFlow, under the tools that only look and one that edits.
SAVED = "Keras: functions, fit, save, load"
FEW_WAYS = """
import maintenance.sweeps.foreign as foreign
foreign.WAYS = {way: foreign.WAYS[way] for way in ("tools", "prune")}
"""


def test_a_program_of_tensorflow(server: ProgramServer, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    found = run(server, tmp_path / "found.json", SAVED, code=FEW_WAYS)
    assert found["left_out"] == {}
    assert found["failures"] == []
    assert found["cases"] == {SAVED: 4}


DOUBLES = """
import maintenance.sweeps.foreign as foreign
foreign.WAYS = {}
from amanda_tools.steer import Steer
foreign.Watch = lambda: Steer("scale", factor=2.0, ops=["linear", "matmul"])
"""


def test_changes_of_tensorflow_are_noticed(server: ProgramServer, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    found = run(server, tmp_path / "found.json", SAVED, code=DOUBLES)
    (failure,) = found["failures"]
    assert failure["how"] == ", watch"
    assert "history: others" in failure["what"]


MISCOUNTS = """
import maintenance.sweeps.foreign as foreign
foreign.Count.analyse = lambda self, context: None
"""


def test_wrong_counts_are_noticed(server: ProgramServer, tmp_path: Path) -> None:
    name = "save_on_cpu, no_grad, inference_mode, set_grad_enabled"
    found = run(server, tmp_path / "found.json", name, code=MISCOUNTS + OWN_TOOLS)
    assert {failure["how"] for failure in found["failures"]} == {
        "native, count",
        "function_mode, count",
    }
