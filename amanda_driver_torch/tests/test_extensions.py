"""Operators outside torch's own bindings, and those that the function protocol does not report."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import doctest
import types
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import amanda
from amanda_core.errors import ActionError
from amanda_core.testing.kit.tools import tool
from amanda_driver_torch import extensions


@pytest.fixture
def extension() -> Iterator[types.ModuleType]:
    """Return a module like that of a C++ extension."""
    module = types.ModuleType("extension")
    module.scale = lambda x, by: torch.mul(x, by)  # type: ignore[attr-defined]
    extensions.register_op(module, "scale", "extension::scale")
    yield module
    extensions.unregister_op(module, "scale")


def test_a_registered_function_is_one_operator_with_an_opaque_body(
    extension: types.ModuleType,
) -> None:
    before, seen = extension.scale, list[str]()

    def analyse(context: amanda.OpContext) -> None:
        seen.append(context.op_type)
        if context.op_type == "extension::scale":
            context.insert_before_op(lambda by: by * 10, inputs=[1])

    x = torch.ones(2, requires_grad=True)
    with amanda.apply(tool(analyse)):
        y = extension.scale(x, 3.0)
    assert seen == ["extension::scale"]
    assert y.tolist() == [30.0, 30.0]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [30.0, 30.0]
    assert extension.scale is before


def test_its_backward_ops_are_mapped_to_it(extension: types.ModuleType) -> None:
    seen: list[tuple[str, str]] = []

    def analyse(context: amanda.OpContext) -> None:
        if context.forward is not None:
            seen.append((context.forward.op_type, context.op_type))

    with amanda.apply(tool(analyse, backward=True)):
        extension.scale(torch.ones(2, requires_grad=True), 3.0).backward(torch.ones(2))
    assert seen == [("extension::scale", "MulBackward0")]


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ActionError, match="has no function 'nothing'"):
        extensions.register_op(torch, "nothing")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_made_of_foreign_memory_are_operators() -> None:
    seen: list[str] = []
    originals = torch.from_numpy, torch.frombuffer
    with amanda.apply(tool(lambda context: seen.append(context.op_type))):
        torch.from_numpy(np.ones(3))
        torch.frombuffer(bytearray(8), dtype=torch.float32)
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert seen[:2] == ["from_numpy", "frombuffer"]
    assert "nested_tensor" in seen
    assert (torch.from_numpy, torch.frombuffer) == originals


def test_examples_of_the_module_run() -> None:
    assert doctest.testmod(extensions).failed == 0
