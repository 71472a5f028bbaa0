"""The cost of a tool's result is proportional to the number of operators, in every form."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from python_calls import python_calls
from torch import nn

import amanda
from amanda_tools.capture import Capture
from amanda_tools.dump import Dump, DumpedTensor, DumpIndex
from amanda_tools.effective_path import EffectivePath
from amanda_tools.fingerprint import Fingerprint
from amanda_tools.flops import Flops
from amanda_tools.graph import GraphTracing
from amanda_tools.kit.output.rendering import dataframe
from amanda_tools.kit.tensors.statistics import Statistics
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.nonfinite import NonFinite
from amanda_tools.replicas import Replicas
from amanda_tools.sensitivity import Sensitivity
from amanda_tools.sparsity import Sparsity
from amanda_tools.trace import Trace

#: Tools with results -> how they are made.
TOOLS: dict[str, Callable[[Path], Any]] = {
    "capture": lambda folder: Capture(["*"], ["*"], ["inputs", "outputs"], everything=True),
    "dump": lambda folder: Dump(["inputs", "weights", "outputs", "gradients"], folder=folder),
    "effective_path": lambda folder: EffectivePath(),
    "fingerprint": lambda folder: Fingerprint(),
    "flops": lambda folder: Flops(["matmul", "norm", "elementwise"]),
    "graph": lambda folder: GraphTracing(),
    "latency": lambda folder: Latency(),
    "memory": lambda folder: Memory(),
    "nonfinite": lambda folder: NonFinite(),
    "replicas": lambda folder: Replicas(),
    "sensitivity": lambda folder: Sensitivity(),
    "sparsity": lambda folder: Sparsity(gradients=True),
    "trace": lambda folder: Trace(),
}


def costs(name: str, modules: int, folder: Path) -> dict[str, int]:
    """Return the Python calls for each form of a tool's result on a model of so many modules."""
    tool: Any = TOOLS[name](folder / f"{name}-{modules}")
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(modules)))
    with amanda.apply(tool):
        model(torch.ones(1, 2)).sum().backward()
    result = tool.result()
    forms: dict[str, Callable[[], object]] = {
        "to_json": result.to_json,
        "table": lambda: str(result.table()),
        "html": result._repr_html_,
    }
    if importlib.util.find_spec("pandas"):
        forms["to_dataframe"] = result.to_dataframe
    return {form: python_calls(run) for form, run in forms.items()}


@pytest.mark.one_interceptor
@pytest.mark.parametrize("name", TOOLS)
def test_costs_are_proportional_to_operators(name: str, tmp_path: Path) -> None:
    few, many = costs(name, 32, tmp_path), costs(name, 128, tmp_path)
    for form, calls in many.items():
        assert calls <= 5 * few[form] + 500, form


def test_a_record_costs_few_calls() -> None:
    """`dataclasses.asdict` makes more than two hundred for each."""
    statistics = Statistics(16, 0, 0, 0, -1.0, 1.0, 0.0, 1.0, 4.0, [1] * 16)

    def index(records: int) -> DumpIndex:
        tensors = [
            DumpedTensor(0, step, 0, "input", "0", "x", "float32", [4, 4], statistics=statistics)
            for step in range(records)
        ]
        return DumpIndex([], tensors)

    def more(render: Callable[[DumpIndex], object]) -> int:
        few, many = index(10), index(110)
        return python_calls(lambda: render(many)) - python_calls(lambda: render(few))

    assert more(DumpIndex.to_json) <= 20 * 100
    if importlib.util.find_spec("pandas"):
        assert more(lambda index: dataframe(DumpedTensor, index.tensors)) <= 100 * 100
