"""If the driver itself fails at an operator, it raises, or the program continues without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core import Session
from amanda_core.engine.calls import Calls
from amanda_core.errors import AmandaWarning
from amanda_core.identity.sites import Sites
from amanda_core.modules.scopes import Labels, Scopes
from amanda_driver_torch.attachment import module_calls, operator_calls
from amanda_driver_torch.attachment.attachment import TorchAttachment
from amanda_driver_torch.execution import execute
from amanda_driver_torch.execution.execute import Execution, Run
from amanda_driver_torch.gradients import gradient_hooks, operator_call
from amanda_driver_torch.gradients.gradient_nodes import Result
from amanda_driver_torch.gradients.records import NodeRecord
from amanda_driver_torch.interception import function_mode, native_interceptor
from amanda_driver_torch.operators import operator

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


class LookAtModules(Look):
    """Look at the calls and values of modules, too, which no longer pass the extension then."""

    def __init__(self) -> None:
        super().__init__()
        self.show_modules("*", inputs=True, outputs=True)
        self.add_inst_for_call(lambda call: None)


def broken(*_: Any, **__: Any) -> Any:
    raise LookupError("a fault in the driver")


def broken_once(original: Any) -> Any:
    """Return a function that fails at its first call."""
    failures = iter([broken])

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return next(failures, original)(*args, **kwargs)

    return call


class Doubled(torch.autograd.Function):
    """An operator in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Own(torch.Tensor):
    """A subclass, which the function protocol reports whole functions for."""


#: Where the fault lies -> the object and attribute that is replaced.
FAULTS: dict[str, tuple[Any, str]] = {
    "finding the site": (Sites, "_group"),
    "classifying a frame": (Sites, "classify"),
    "the name of a weight": (Labels, "look_up"),
    "binding arguments": (operator_call, "bind"),
    "analysis before": (Run, "_analyse"),
    "after the op": (Run, "outputs_of"),
    "tracking of nodes": (execute, "hook_nodes"),
    "rebuilding the result": (execute, "restructure"),
    "before a node": (NodeRecord, "before"),
    "after a node": (NodeRecord, "after"),
    "gradients of inputs": (Result, "given"),
    "facts of an operator": (operator, "schemas_of"),
    "whether to ignore the op": (operator_calls, "reason_to_ignore"),
    "an operator in Python": (operator_calls, "Operator"),
    "the scope of a module": (Scopes, "enter"),
    "the end of a step": (Session, "end_step"),
}
OF_MODULES: dict[str, tuple[Any, str]] = {
    "the scope of a watched module": (Scopes, "enter"),
    "the call of a model": (Calls, "enter"),
    "a module's input or output": (module_calls, "replace_first"),
}
#: The same in what only one interceptor uses.
OF_ONE: dict[str, dict[str, tuple[Any, str]]] = {
    "native": {
        "type of a dispatcher's operator": (native_interceptor, "type_name"),
        "what a module depends on": (Scopes, "holders"),
    },
    "function_mode": {
        "a function of the protocol": (operator, "type_name"),
        "a function of a subclass": (function_mode, "is_operator_name"),
        "overriding types": (function_mode, "has_override"),
    },
}
PAIRS = [(name, one) for one, own in OF_ONE.items() for name in (*FAULTS, *OF_MODULES, *own)]


def program() -> list[torch.Tensor]:
    """Write in place, draw random numbers, differentiate, and train."""
    torch.manual_seed(3)
    x = leaf(4, 3)
    total = torch.zeros(4, 3)
    total.add_(1)
    total += torch.rand(4, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    doubled = Doubled.apply(x)  # type: ignore[no-untyped-call]
    loss = torch.ops.aten.relu.default(model(doubled) * total).sum()
    loss.backward()
    optimizer.step()
    assert x.grad is not None
    parts = torch.functional.split(torch.rand(2, 2).as_subclass(Own), 1)
    rest = [part.as_subclass(torch.Tensor) for part in parts]
    weights = [parameter.detach() for parameter in model.parameters()]
    return [total, loss.detach(), x.grad, *weights, *rest, torch.rand(1)]


#: Causes the fault; returns the tool under which it shows.
Fault = Callable[[], Look]


@pytest.fixture(params=[False, True], ids=["always", "once"])
def once(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=PAIRS, ids=" ".join)
def fault(request: pytest.FixtureRequest, once: bool, monkeypatch: pytest.MonkeyPatch) -> Fault:
    name, interceptor = request.param
    owner, attribute = {**FAULTS, **OF_MODULES, **OF_ONE[interceptor]}[name]
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", interceptor)
    monkeypatch.setattr(native_interceptor, "_KNOWN", {})
    replacement = broken_once(getattr(owner, attribute)) if once else broken

    def cause() -> Look:
        monkeypatch.setattr(owner, attribute, replacement)
        return LookAtModules() if name in OF_MODULES else Look()

    return cause


def test_program_goes_on_and_nothing_is_executed_twice(fault: Fault) -> None:
    plain = program()
    tool = fault()
    with amanda.apply(tool, on_driver_error="skip") as handle:
        results = program()
        coverage = handle.coverage()["pytorch"]
    assert all(map(torch.equal, results, plain))
    assert any("a fault in the driver" in left_out.why for left_out in coverage)
    assert any("where a driver failed" in line for line in tool.not_seen())


def test_error_says_that_it_is_the_drivers(fault: Fault) -> None:
    tool = fault()
    with pytest.raises(LookupError, match="a fault in the driver") as caught, amanda.apply(tool):
        program()
    (note,) = caught.value.__notes__
    assert "error of Amanda's driver" in note
    assert "on_driver_error='skip'" in note


@pytest.mark.one_interceptor
@pytest.mark.parametrize("edits", ["insert_before_op", "insert_after_op"])
def test_an_edit_that_the_extension_cannot_make_is_left_out(
    edits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: getattr(context, edits)(lambda *values: values))
    programs: list[Any] = [torch.rand, lambda size: torch.zeros(size).add_(1).mul(torch.rand(size))]

    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [run(3) for _ in range(3) for run in programs]

    plain = drawn()
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    monkeypatch.setattr(Execution, "edit", broken)
    with amanda.apply(tool, on_driver_error="skip") as handle:
        assert all(map(torch.equal, drawn(), plain))
        coverage = handle.coverage()["pytorch"]
    assert any("a fault in the driver" in left_out.why for left_out in coverage)
    with pytest.raises(LookupError, match="a fault in the driver") as caught, amanda.apply(tool):
        drawn()
    assert any("error of Amanda's driver" in note for note in caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.one_interceptor
@pytest.mark.parametrize("interceptor", ["native", "function_mode"])
def test_compiled_callables_run_eagerly_where_the_choice_fails(
    interceptor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", interceptor)
    monkeypatch.setattr(native_interceptor, "_KNOWN", {})
    monkeypatch.setattr(TorchAttachment, "_why_eager", broken)
    compiled = torch.compile(lambda x: torch.relu(x.add_(torch.rand(3))), backend="eager")
    torch.manual_seed(3)
    expected = torch.relu(torch.ones(3).add_(torch.rand(3)))
    torch.manual_seed(3)
    with amanda.apply(Look(), on_driver_error="skip") as handle:
        with pytest.warns(AmandaWarning, match="run eagerly"):
            result = compiled(torch.ones(3))
        coverage = handle.coverage()["pytorch"]
    assert torch.equal(result, expected)
    assert any("a fault in the driver" in left_out.why for left_out in coverage)
    with pytest.raises(LookupError, match="a fault in the driver") as caught, amanda.apply(Look()):
        compiled(torch.ones(3))
    assert any("error of Amanda's driver" in note for note in caught.value.__notes__)


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
