"""Every tool on programs of second and mixed order: no tool fails or changes them."""

# mypy: allow-untyped-calls
# torch leaves much untyped.

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch.utils._pytree import tree_leaves

import amanda

from .every_tool import EDITING, TOOLS, checked
from .higher_order_torch import PROGRAMS

#: Run with the fast tests; the others with the slow ones.
SAMPLE = {"dump", "flops", "latency", "sparsity"}


def bits(results: Any) -> list[bytes | None]:
    """Return the results of a program as bytes."""
    tensors = tree_leaves(results)
    return [None if tensor is None else tensor.detach().numpy().tobytes() for tensor in tensors]


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
