"""A sample of the sweep with fixed size and seed: nothing is unexplained, and it can fail.

`nox -s sweep` runs all of it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from program_server import ProgramServer

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

ROOT = Path(__file__).resolve().parents[2]

#: What the parts that run here have in common.
IMPORTS = "import torch.testing._internal.common_methods_invocations"
MAIN = "from maintenance.sweeps.__main__ import main\nraise SystemExit(main())"

#: Ops whose gradients, views or layouts once differed.
ONCE_WRONG = [
    *("squeeze float32", "atleast_2d complex64", "split.list_args float32"),
    *("nn.functional.softsign complex64", "pca_lowrank float32"),
]
#: Prints the runs of a program with shipped tools: one with all that look, one for each that edits.
WAYS = "from maintenance.sweeps.shipped import EDITING; print(1 + len(EDITING))"

Sweep = Callable[..., tuple[int, str, dict[str, Any]]]


def serve(imports: str) -> ProgramServer:
    """Provide a server that forks, because a fault may leave something behind."""
    # The package lies in the root, which `-P` would hide.
    left_out = ("PYTHONSAFEPATH", "AMANDA_TORCH_INTERCEPTOR")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    return ProgramServer(imports, forks=True, cwd=ROOT, env=env)


@pytest.fixture(scope="module")
def server() -> Iterator[ProgramServer]:
    with serve(IMPORTS) as server:
        yield server


def run(
    server: ProgramServer, folder: Path, *arguments: str, code: str = ""
) -> tuple[int, str, dict[str, Any]]:
    """Run a part after some other code; return its status, output and result."""
    status, output = server.run(f"{code}\n{MAIN}", *arguments, "--output", folder)
    (path,) = folder.glob("*.json")
    return status, output, json.loads(path.read_text())


@pytest.fixture
def sweep(server: ProgramServer, tmp_path: Path) -> Sweep:
    return functools.partial(run, server, tmp_path)


def test_a_sample_of_operators(sweep: Sweep) -> None:
    status, output, found = sweep("operators", "--sample", "24", "--seed", "7", "--inputs", "1")
    assert status == 0, output
    assert found["counts"]["instrumented runs"] > 300
    assert found["counts"]["routines called"] > 2000


@pytest.mark.parametrize("case", ONCE_WRONG)
def test_operators_that_were_wrong(sweep: Sweep, case: str) -> None:
    status, output, found = sweep("operators", "--only", case, "--inputs", "2")
    assert status == 0, output
    assert found["cases"][case] > 0


FRAMEWORKS = {
    "torch": ["--sample", "5", "--seed", "7"],
    "tensorflow": ["--only", "handles at random"],
    "tensorflow-function": ["--only", "handles at random"],
    "tensorflow-graph": ["--only", "handles at random"],
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_faults(sweep: Sweep, framework: str) -> None:
    if framework != "torch" and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    what = ["--framework", framework, *FRAMEWORKS[framework]]
    status, output, found = sweep("faults", *what)
    assert status == 0, output
    assert sum(found["cases"].values()) >= 8


def test_a_model_and_who_accounts_for_its_operators(server: ProgramServer, sweep: Sweep) -> None:
    pytest.importorskip("transformers")
    model = "GPT2ForSequenceClassification"
    status, output, found = sweep("models", "--only", model)
    assert status == 0, output
    assert found["counts"]["operators counted by torch"] > 1000
    assert found["cases"][model] == 2 * (3 + int(server.check(WAYS)) + 1)


def test_random_programs(server: ProgramServer, sweep: Sweep) -> None:
    status, output, found = sweep("random", "--sample", "2", "--seed", "100")
    assert status == 0, output
    # Of each interceptor 3 routines, the shipped tools, 3 ways of edits; and both.
    assert sum(found["cases"].values()) == 2 * (2 * (3 + int(server.check(WAYS)) + 3) + 1)
    assert found["counts"]["programs that edits change"] > 0


def test_long_runs(tmp_path: Path) -> None:
    with serve("") as server:  # In a fork of a process with imports memory is copied bit by bit.
        status, output, found = run(server, tmp_path, "long", "--steps", "30")
    assert status == 0, output
    assert len(found["cases"]) == 6 or "/proc" in str(found["left_out"])


def test_long_runs_under_the_shipped_tools(tmp_path: Path) -> None:
    what = ["long", "--shipped", "--steps", "20"]
    for number, only in enumerate(["sessions, quantize", "threads, tools"]):
        with serve("") as server:
            status, output, found = run(server, tmp_path / str(number), *what, "--only", only)
        assert status == 0, output
        named = set(found["cases"])
        expected = {f"{only}, {interceptor}" for interceptor in ("native", "function_mode")}
        assert named == expected or "/proc" in str(found["left_out"])


def test_an_exception_that_is_needed_is_not_stale(sweep: Sweep) -> None:
    status, output, found = sweep("exceptions", "--only", "pruning: view")
    assert status == 0, output
    assert found["cases"] == {"program parametrizations and pruning: view": 1}


UNSEEN = """
import maintenance.sweeps.coverage as coverage
forward = coverage.Inside.forward
coverage.Inside.forward = lambda self, c: None if c.op_type == "tanh" else forward(self, c)
"""
STALE = """
import maintenance.sweeps.foreign_programs as programs
programs.PROGRAMS["parametrizations and pruning"].left_alone["linear"] = "nothing"
"""
GROWS = """
import maintenance.sweeps.long as long
import gc
kept = []
count = long.Statistics.count
long.Statistics.count = lambda self, *v: (count(self, *v), kept.append([[] for _ in range(20)]))[0]
"""
SHIPPED_GROWS = """
import amanda_tools.prune as prune
kept = []
result = prune.Prune.result
prune.Prune.result = lambda self: (result(self), kept.append([[] for _ in range(60)]))[0]
"""


@pytest.mark.parametrize(
    ("code", "what", "told"),
    [
        (UNSEEN, ["models", "--only", "GPT2ForSequenceClassification"], "aten::tanh ran"),
        (STALE, ["exceptions", "--only", "pruning: linear"], "stale"),
        (GROWS, ["long", "--steps", "60", "--only", "training, native"], "objects grew"),
        (
            SHIPPED_GROWS,
            ["long", "--shipped", "--steps", "30", "--only", "sessions, prune, native"],
            "objects grew",
        ),
    ],
    ids=["an unseen operator", "a stale exception", "what grows", "a shipped tool that grows"],
)
def test_it_notices(sweep: Sweep, code: str, what: list[str], told: str) -> None:
    if what[0] == "models":
        pytest.importorskip("transformers")
    status, output, found = sweep(*what, code=code)
    assert status == 1, output
    assert told in str(found["failures"])


CHANGES = """
import maintenance.sweeps.identity as identity
identity.ROUTINES["none"] = lambda *values: tuple(
    v * 1.0001 if getattr(v, "is_floating_point", bool)() else v for v in values
)
"""
MISSES = """
import maintenance.sweeps.programs as programs
from amanda_driver_torch.threads.state import STATE
run = programs.Program.run
def wrong(self, inputs):
    ran = run(self, inputs)
    for leaf in ran.leaves() if self.twice and STATE.attachment else ():
        if leaf.grad is not None:
            leaf.grad *= 1.00002
    return ran
programs.Program.run = wrong
"""
LEAVES = """
import amanda_core.engine.stacks as stacks
import torch
close = stacks.Stack.close
def forgetful(self):
    close(self)
    torch.nn.functional.silu = lambda *a: None
stacks.Stack.close = forgetful
"""


LEAVES_A_GRADIENT = """
import amanda_core.engine.stacks as stacks
import itertools
import tensorflow as tf
close, numbers = stacks.Stack.close, itertools.count()
def forgetful(self):
    close(self)
    tf.RegisterGradient(f"Left{next(numbers)}")(lambda op, gradient: gradient)
stacks.Stack.close = forgetful
"""


RAISES = """
from amanda_tools.flops import Flops
def analyse(self, context):
    raise ValueError("not of this op")
Flops.analyse = analyse
"""


def test_it_names_the_shipped_tool_that_fails(sweep: Sweep) -> None:
    status, output, found = sweep("random", "--sample", "1", "--seed", "100", code=RAISES)
    assert status == 1, output
    for failure in found["failures"]:
        assert failure["how"].endswith(", tools")
        assert [what.split(":")[0] for what in failure["what"][1:]] == ["flops alone"]


def test_it_notices_a_changed_bit(sweep: Sweep) -> None:
    status, output, found = sweep(
        "operators", "--only", "tanh float32", "--inputs", "1", code=CHANGES
    )
    assert status == 1, output
    assert {failure["how"].split(", ")[2][:4] for failure in found["failures"]} == {"none"}


def test_it_notices_a_second_order_gradient(sweep: Sweep) -> None:
    what = ("operators", "--only", "svd_lowrank complex64", "--inputs", "1")
    status, output, found = sweep(*what, code=MISSES)
    assert status == 1, output
    names = {name for failure in found["failures"] for name in failure["what"]}
    assert {name[:12] for name in names if " alone: " not in name} == {"second-order"}


def test_it_notices_what_is_left(sweep: Sweep) -> None:
    status, output, found = sweep("faults", "--only", "garbage", code=LEAVES)
    assert status == 1, output
    assert "left: torch.nn.functional.silu" in found["failures"][0]["what"]


def test_it_notices_a_gradient_that_is_left_in_tensorflow(sweep: Sweep) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    what = ["faults", "--framework", "tensorflow", "--only", "garbage"]
    status, output, found = sweep(*what, code=LEAVES_A_GRADIENT)
    assert status == 1, output
    assert "left: gradient registry" in found["failures"][0]["what"]
