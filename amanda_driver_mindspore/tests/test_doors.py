"""No operator that reaches MindSpore's dispatcher lies outside of one that the driver sees.

`MsDispatchMode` is MindSpore's own: it is below autograd, and sees what the doors lead to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import pytest

import amanda
from amanda_core.runtime.switches import ROUTINE_DEPTH
from amanda_core.runtime.threads import THREAD

from .networks import EXPRESSIONS, NETWORKS, flat

#: What reaches the dispatcher without tensors: arithmetic of shapes.
NOT_TENSORS = {"typeof", "make_range"}


class Oracle(ms.MsDispatchMode):  # type: ignore[misc]
    """Notes the operators that run outside of those that the driver executes."""

    def __init__(self) -> None:
        self.outside: list[str] = []

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        if not THREAD.control.switches[ROUTINE_DEPTH]:
            self.outside.append(func.name)
        return func(*args)


def watched() -> tuple[amanda.Tool, list[str]]:
    """Return a tool that acts at each operator, and the list of types that it fills."""
    seen: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_op(lambda *values: seen.append(context.op_type), observe=True)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    return tool, seen


def checked(run: Callable[[], Any]) -> list[str]:
    """Check that no operator is missed in a program; return the types that a tool saw."""
    tool, seen = watched()
    with amanda.apply(tool), Oracle() as oracle:
        found = flat(run())
    assert found
    for tensor in found:
        tensor.asnumpy()
    missed = [name for name in oracle.outside if name not in NOT_TENSORS]
    assert missed == []
    return seen


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_has_no_operator_outside(name: str) -> None:
    run = EXPRESSIONS[name]
    ms.set_seed(1)
    try:
        for tensor in flat(run()):
            tensor.asnumpy()
    except RuntimeError as error:  # MindSpore's own, at the first look at a value.
        pytest.skip(f"MindSpore has no kernel for it here: {str(error).splitlines()[0]}")
    assert checked(run)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_no_operator_outside(name: str) -> None:
    make, x = NETWORKS[name]
    network = make()
    assert len(checked(lambda: network(x))) > 1


def test_an_operator_outside_is_found() -> None:
    x = ms.Tensor([1.0, -1.0])
    with Oracle() as oracle:
        ms.ops.relu(x)
    assert oracle.outside == ["ReLU"]
