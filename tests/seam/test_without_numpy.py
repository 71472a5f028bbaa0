"""Tools without NumPy, which amanda-tools requires: they refuse at once, or run.

A tool that finds out in the middle would end the program.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward untyped.

from __future__ import annotations

import subprocess
import sys

from every_tool import EDITING, TOOLS

PROGRAM = """
import sys

sys.modules["numpy"] = None  # `import numpy` raises ImportError.
import torch
from every_tool import EDITING, TOOLS

import amanda

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
x = torch.arange(32.0).reshape(4, 8)


def run():
    results = []
    for _ in range(2):
        model.zero_grad()
        y = model(x)
        y.sum().backward()
        results += [y.tolist(), *(p.grad.tolist() for p in model.parameters())]
    return results


expected = run()
for name, make in (TOOLS | EDITING).items():
    try:
        tool = make()
    except ImportError as error:
        print(name, "refuses", error, sep=": ")
        continue
    with amanda.apply(tool):
        found = run()
    tool.result().to_json()
    print(name, "runs" if found == expected else "differs", sep=": ")
"""


def test_every_tool_runs_or_refuses_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    outcomes = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert outcomes.keys() == (TOOLS | EDITING).keys()
    refusal = "refuses: This needs NumPy, which is missing: pip install numpy"
    assert set(outcomes.values()) == {"runs", refusal}
