"""Tools that only look, on programs whose tensors have no values that NumPy could represent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import amanda
from amanda_tools.dump import Dump
from amanda_tools.effective_path import EffectivePath
from amanda_tools.flops import Flops
from amanda_tools.graph import GraphTracing
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.nonfinite import NonFinite
from amanda_tools.sparsity import Sparsity
from amanda_tools.trace import Trace

torch: Any = pytest.importorskip("torch")

TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    "dump": lambda: Dump(["inputs", "weights", "outputs", "gradients"], stats=True),
    "effective path": EffectivePath,
    "flops": Flops,
    "graph": GraphTracing,
    "latency": Latency,
    "memory": Memory,
    "nonfinite": NonFinite,
    "sparsity": lambda: Sparsity(gradients=True),
    "trace": Trace,
}


def logging_tensor(dense: Any) -> Any:
    from torch.testing._internal.logging_tensor import LoggingTensor

    made: Any = LoggingTensor
    return made(dense)


def fake(dense: Any) -> Any:
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(dense)


class Plain(torch.Tensor):  # type: ignore[misc]
    """A subclass that changes nothing."""


TENSORS: dict[str, Callable[[Any], Any]] = {
    "wrapper subclass": logging_tensor,
    "subclass": lambda dense: dense.as_subclass(Plain),
    "fake": fake,
    "meta": lambda dense: dense.to("meta"),
    "sparse COO": lambda dense: dense.to_sparse_coo(),
    "sparse CSR": lambda dense: dense.to_sparse_csr(),
    "mkldnn": lambda dense: dense.to_mkldnn(),
    "jagged": lambda dense: torch.nested.nested_tensor([dense[0], dense[1]], layout=torch.jagged),
    "masked": lambda dense: torch.masked.masked_tensor(dense, dense > 0),
    "bfloat16": lambda dense: dense.bfloat16(),
    "conjugate": lambda dense: torch.complex(dense, dense).conj(),
    "half": lambda dense: dense.half(),
}


def program(kind: str) -> Any:
    """Use a tensor of this kind as the input of a few operators, forward and backward."""
    x = TENSORS[kind](torch.tensor([[1.0, 0.0, -2.0], [0.5, 3.0, 0.0]]))
    if kind not in ("masked", "mkldnn"):
        x = x.detach().requires_grad_()
    y = x * 2
    if kind not in ("sparse CSR", "masked", "conjugate"):
        y = torch.relu(y)
    if x.requires_grad:
        (gradient,) = torch.autograd.grad(y, x, y.detach())
        y = gradient
    # Jagged tensors print a number that is another one for each.
    return re.sub(r"\bj\d+", "j", str(y))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("name", TOOLS)
def test_the_program_ends_as_without_the_tool(name: str, kind: str) -> None:
    expected = program(kind)
    tool: Any = TOOLS[name]()
    with amanda.apply(tool):
        found = program(kind)
    assert found == expected
    tool.result()
