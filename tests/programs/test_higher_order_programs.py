"""Every tool on programs of second and mixed order: no tool fails or changes them."""

# mypy: allow-untyped-calls
# torch leaves much untyped.

from __future__ import annotations

import warnings
from importlib.metadata import entry_points
from typing import Any

import pytest
from every_tool import EDITING, TOOLS, checked
from torch.utils._pytree import tree_leaves

import amanda

from .higher_order_torch import PROGRAMS

#: Run with the fast tests; the others with the slow ones.
SAMPLE = {"dump", "flops", "latency", "sparsity"}


def bits(results: Any) -> list[bytes | None]:
    """Return the results of a program as bytes."""
    tensors = tree_leaves(results)
    return [None if tensor is None else tensor.detach().numpy().tobytes() for tensor in tensors]


def test_every_shipped_tool_is_among_them() -> None:
    shipped = {
        entry.name
        for entry in entry_points(group="amanda.tools")
        if entry.dist is not None and entry.dist.name == "amanda-tools"
    }
    assert {name.partition(" ")[0] for name in TOOLS | EDITING} == shipped
    assert len(PROGRAMS) >= 15


@pytest.mark.parametrize(
    "name",
    [
        name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow)
        for name in TOOLS | EDITING
    ],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs_as_without_it(program: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of prototypes in PyTorch.
        expected = bits(PROGRAMS[program]())
        tool = (TOOLS | EDITING)[name]()
        with amanda.apply(tool):
            found = bits(PROGRAMS[program]())
    assert found == expected
    checked(name, tool)
