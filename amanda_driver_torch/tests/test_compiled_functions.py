"""Tests of the parts of compiled graphs beside operators: functions with gradients of their own,
hooks of tensors, and regions that are compiled once. They stay compiled, or are refused by name.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, disable-error-code="misc"
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core.testing.kit.tools import idle

from .interceptors import STAYS_COMPILED
from .tensors import close, equal

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.usefixtures("fresh_compiler"),
    # A callable that runs eagerly would show nothing.
    pytest.mark.filterwarnings("error::amanda.AmandaWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # Dynamo's own.
    STAYS_COMPILED,
]

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Scaled(torch.autograd.Function):
    """Has two outputs, a number among its arguments, and gradients that no operator has."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, factor: float) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x * weight * factor, x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        own = gradients[0] * weight * ctx.factor + gradients[1] * x.cos()
        return own, gradients[0] * x * 7, None


class Sine(torch.autograd.Function):
    """Has a context of its own, and a gradient three times that of a sine."""

    @staticmethod
    def forward(x: Any) -> Any:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0].cos() * 3


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.linspace(1, 2, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        first, second = Scaled.apply(self.inner(x), self.weight, 2.0)
        return Sine.apply(first).tanh() + second


class Hooks(Functions):
    def forward(self, x: torch.Tensor) -> Any:
        y = x.exp() * self.weight
        y.register_hook(lambda gradient: gradient * 2)
        z = self.inner(y)
        z.register_hook(lambda gradient: gradient + z.detach())
        return z.cos()


region: Any = getattr(torch.compiler, "nested_compile_region", None)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.inner(x))


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        if region is None:
            pytest.skip("this PyTorch has no nested_compile_region")
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.call = region(lambda layer, x: layer(x).sin())

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


class Looking(amanda.Tool):
    """Notes the ids of operators, and what its routines get.

    Args:
        gradients: Whether they get the gradients of operators as a whole.
    """

    def __init__(self, gradients: bool = False) -> None:
        super().__init__()
        self.ids: dict[str, int] = {}
        self.found: list[Any] = []
        self.gradients = gradients
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        name = context.name
        self.ids[name] = context.get_op_id()
        context.insert_before_op(lambda *values: self.note(name, "in", values), observe=True)
        context.insert_after_op(lambda *values: self.note(name, "out", values), observe=True)
        context.insert_after_backward_op(
            lambda *values: self.note(name, "grad_in", values), observe=True
        )
        if self.gradients:
            context.insert_before_backward_op(
                lambda *values: self.note(name, "grad_out", values), observe=True
            )

    def analyse_backward(self, context: amanda.OpContext) -> None:
        if context.forward is not None:
            name = f"{context.op_type} {context.get_op_id()}"
            context.insert_before_backward_op(
                lambda *values: self.note(name, "raw", values), observe=True
            )

    def note(self, *found: Any) -> None:
        name, point, values = found
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        sums = [round(float(one.detach().double().sum()), 4) + 0.0 for one in tensors]
        self.found.append((name, point, len(values), sums))


def trained(model: nn.Module, call: Callable[..., Any]) -> list[torch.Tensor]:
    model.zero_grad()
    x = X.clone().requires_grad_()
    output = call(x)
    output.sum().backward()
    gradients = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
    return [output.detach(), *(gradient.clone() for gradient in gradients)]


def compiled_of(model: nn.Module) -> Callable[..., Any]:
    found: Callable[..., Any] = torch.compile(model, backend="aot_eager", fullgraph=True)
    return found


@pytest.mark.parametrize("make", [Functions, Hooks, Regions])
def test_they_are_observed_as_in_eager_mode(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    gets_gradients = make is not Hooks
    tool, reference = Looking(gets_gradients), Looking(gets_gradients)
    compiled = compiled_of(model)
    plain = trained(model, compiled)
    with amanda.apply(tool):
        found = trained(model, compiled)
    with amanda.apply(reference):
        expected = trained(model, model)
    equal(found, plain)
    close(found, expected)
    equal(trained(model, compiled), plain)
    assert tool.ids == reference.ids
    assert sorted(tool.found) == sorted(reference.found)
    if make is Functions:
        assert {"Scaled", "Sine"} <= tool.ids.keys()
        kinds = {name.partition(" ")[0] for name, point, *_ in tool.found if point == "raw"}
        assert {"ScaledBackward", "SineBackward"} <= kinds


@pytest.mark.parametrize("make", [Functions, Hooks, Regions])
def test_they_stay_as_they_are_if_nothing_is_inserted(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    compiled = compiled_of(model)
    plain = trained(model, compiled)
    with amanda.apply(idle()):
        found = trained(model, compiled)
    equal(found, plain)


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "host"])
def test_functions_are_edited(staged: bool) -> None:
    torch.manual_seed(0)
    model = Functions()

    def one_more(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    mark: Callable[[Any], Any] = amanda.staged if staged else lambda routine: routine

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "Scaled":
            context.insert_before_op(mark(one_more), inputs=[1])
            context.insert_after_op(mark(doubled), outputs=[1])
            context.insert_before_backward_op(mark(doubled), grad_outputs=[0])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        found = trained(model, compiled_of(model))

    def by_hand(x: torch.Tensor) -> Any:
        given, weight = model.inner(x), model.weight
        first, second = Scaled.apply(given, weight + weight.detach() * 0 + 1, 2.0)
        # Twice the value with the gradient of the value; the value with twice its gradient.
        second = second + second.detach()
        first = first * 2 - first.detach()
        return Sine.apply(first).tanh() + second

    close(found, trained(model, by_hand))


class Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Closing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * OUTSIDE

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * OUTSIDE


class Calling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return INNER(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        return y * 2 + x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], gradients[0] * 2


def hooked(x: torch.Tensor) -> Any:
    y = x.exp()
    y.register_hook(lambda gradient: gradient * 2)
    return y.sin()


OUTSIDE = torch.linspace(1, 2, 4)
INNER = nn.Tanh()
#: What a compiled graph cannot have -> a program, and a word of the notice.
REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "written": (lambda x: Writing.apply(x * 1), "Writing writes its arguments"),
    "outside": (lambda x: Closing.apply(x), "Closing reads tensors other than its arguments"),
    "order": (lambda x: Swapped.apply(x, x * 2), "Swapped has another order of gradients"),
    "modules": (lambda x: Calling.apply(x), "Calling calls modules"),
    "hook": (hooked, "the program registers a hook"),
}


@pytest.mark.filterwarnings("default::amanda.AmandaWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_others_run_eagerly_with_the_reason(name: str) -> None:
    program, reason = REFUSED[name]
    model, tool, reference = nn.Identity(), Looking(True), Looking(True)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    plain = trained(model, compiled)
    with amanda.apply(tool) as handle:
        with pytest.warns(amanda.AmandaWarning, match=reason):
            found = trained(model, compiled)
        gaps = [gap.what for gap in handle.coverage()["pytorch"]]
    equal(found, plain)
    assert any(what.startswith("compiled callable") for what in gaps)
    with amanda.apply(reference):
        trained(model, program)
    assert sorted(tool.found) == sorted(reference.found)
