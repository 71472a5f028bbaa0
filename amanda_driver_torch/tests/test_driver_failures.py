"""If the driver itself fails at an operator, it raises, or the program continues without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import amanda
from amanda_core.scopes import Labels
from amanda_core.sites import Sites
from amanda_driver_torch._autograd import gradient_hooks
from amanda_driver_torch._autograd.gradient_nodes import Result
from amanda_driver_torch._autograd.records import NodeRecord
from amanda_driver_torch._execution import execute
from amanda_driver_torch._execution.execute import Execution, Run

from .tensors import leaf


class Look(amanda.Tool):
    """Look at every value, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(lambda context: None, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        self.seen.append(context.op_type)
        context.insert_before_op(self.look)
        context.insert_after_op(self.look)
        context.insert_before_backward_op(self.look, grad_outputs=[0])
        context.insert_after_backward_op(self.look, grad_inputs=[0])

    def look(self, *values: Any) -> None: ...


def broken(*_: Any, **__: Any) -> Any:
    raise LookupError("a fault in the driver")


#: Where the fault lies -> the object and attribute that is replaced.
FAULTS: dict[str, tuple[Any, str]] = {
    "finding the site": (Sites, "_weights"),
    "classifying a frame": (Sites, "classify"),
    "the name of a weight": (Labels, "look_up"),
    "binding arguments": (execute, "bind"),
    "analysis before": (Run, "_analyse"),
    "after the op": (Run, "outputs_of"),
    "tracking of nodes": (Execution, "_track"),
    "rebuilding the result": (execute, "restructure"),
    "before a node": (NodeRecord, "before"),
    "after a node": (NodeRecord, "after"),
    "gradients of inputs": (Result, "given"),
}


def program() -> list[torch.Tensor]:
    """Write in place, draw random numbers, and differentiate."""
    torch.manual_seed(3)
    x = leaf(4, 3)
    total = torch.zeros(4, 3)
    total.add_(1)
    total += torch.rand(4, 3)
    loss = torch.relu(x * total).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return [total, loss.detach(), x.grad]


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    owner, name = FAULTS[request.param]
    return lambda: monkeypatch.setattr(owner, name, broken)


def test_program_goes_on_and_nothing_is_executed_twice(fault: Callable[[], None]) -> None:
    plain = program()
    fault()
    with amanda.apply(Look(), on_driver_error="skip") as handle:
        results = program()
        coverage = handle.coverage()["pytorch"]
    assert all(map(torch.equal, results, plain))
    assert any("a fault in the driver" in left_out.why for left_out in coverage)


def test_error_says_that_it_is_the_drivers(fault: Callable[[], None]) -> None:
    fault()
    with pytest.raises(LookupError, match="a fault in the driver") as caught, amanda.apply(Look()):
        program()
    (note,) = caught.value.__notes__
    assert "error of Amanda's driver" in note
    assert "on_driver_error='skip'" in note


def test_gradients_pass_where_a_hook_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = gradient_hooks.tensor_hook(broken)
    x = leaf(3)
    x.register_hook(hook)  # type: ignore[no-untyped-call]
    with amanda.apply(Look(), on_driver_error="skip") as handle:
        (x * 2).sum().backward()  # type: ignore[no-untyped-call]
        coverage = handle.coverage()["pytorch"]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert any("a fault in the driver" in left_out.why for left_out in coverage)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_errors_of_the_program_and_of_routines_stay_what_they_are(policy: Any) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of a routine")

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(fail))
    with amanda.apply(Look(), on_driver_error=policy) as handle:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            torch.ones(2, 3) @ torch.ones(2, 3)
        with amanda.apply(tool), pytest.raises(ZeroDivisionError, match="of a routine"):
            torch.relu(torch.ones(1))
        assert not any("failed there" in gap.why for gap in handle.coverage()["pytorch"])
    assert not getattr(caught.value, "__notes__", [])


def test_another_policy_is_refused() -> None:
    with pytest.raises(amanda.AmandaError, match="is not a policy"):
        amanda.apply(amanda.Tool(), on_driver_error="ignore")  # type: ignore[arg-type]
