"""Tools that are shown operators inside transforms of `torch.func`."""

# mypy: allow-untyped-calls
# torch leaves much of torch.func untyped.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import amanda
from amanda_core.interface import UnsupportedError

X = torch.linspace(-2, 2, 12).reshape(3, 4)


class Shown(amanda.Tool):
    """Notes the operators that it is shown, and the shapes of their results."""

    sees_transforms = True

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, tuple[str, ...]]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.modes: set[str] = set()
        self.ids: dict[str, int] = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if "transforms" in context:
            self.ops.append((context.op_type, context["transforms"]))
            self.modes.add(context.namespace.rpartition("/")[2])
            self.ids[context.op_type] = context.get_op_id()
            context.insert_after_op(self.look, observe=True)

    def look(self, *values: torch.Tensor) -> None:
        self.shapes += [tuple(value.numpy().shape) for value in values]


class Doubling(amanda.Tool):
    """Doubles the result of each sine, or computes twice the sine in its place."""

    sees_transforms = True

    def __init__(self, replaces: bool = False, staged: bool = True) -> None:
        super().__init__()
        mark: Callable[[Any], Any] = amanda.staged if staged else lambda routine: routine

        def analyse(context: amanda.OpContext) -> None:
            if context.op_type == "sin" and replaces:
                context.replace_op(mark(lambda x: x.sin() * 2))
            elif context.op_type == "sin":
                context.insert_after_op(mark(lambda y: y * 2))

        self.add_inst_for_op(analyse)


def function(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum()


def last(*arguments: Any) -> Any:
    return jvp(*arguments)[1]


#: A transform of `function`, the names of its levels, and the shape that each value has in it.
TRANSFORMS: dict[str, tuple[Callable[[], torch.Tensor], tuple[str, ...], tuple[int, ...]]] = {
    "vmap": (lambda: vmap(function)(X), ("vmap",), (3, 4)),
    "of another dimension": (lambda: vmap(function, 1)(X), ("vmap",), (4, 3)),
    "nested": (lambda: vmap(vmap(function), 1)(X), ("vmap", "vmap"), (4, 3)),
    "grad": (lambda: grad(function)(X), ("grad",), (3, 4)),
    "per sample": (lambda: vmap(grad(function))(X), ("vmap", "grad"), (3, 4)),
    "jacrev": (lambda: jacrev(function)(X), ("grad",), (3, 4)),
    "jvp": (lambda: last(function, (X,), (torch.ones(3, 4),)), ("jvp",), (3, 4)),
    "hessian": (lambda: hessian(function)(X), ("vmap", "jvp", "grad"), (3, 4)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_operators_are_shown(name: str) -> None:
    run, levels, shape = TRANSFORMS[name]
    expected, tool = run(), Shown()
    with amanda.apply(tool):
        found = run()
    assert torch.equal(found, expected)
    assert [one for one in tool.ops if one[0] in ("sin", "mul", "sum")] == [
        (op, levels) for op in ("sin", "mul", "sum")
    ]
    assert tool.modes == {"transformed"}
    # Dimensions of `vmap` come first, the outermost one before all others.
    assert tool.shapes[:2] == [shape, shape]


def test_an_operator_has_the_id_that_it_has_outside() -> None:
    ids: dict[str, int] = {}
    outside = amanda.Tool()
    outside.add_inst_for_op(lambda context: ids.update({context.op_type: context.get_op_id()}))
    net, tool = nn.Sequential(nn.Linear(4, 2), nn.Tanh()), Shown()
    for one, run in ((outside, net), (tool, vmap(net))):
        with amanda.apply(one):
            run(X)
    assert {op: tool.ids[op] for op in ("linear", "tanh")} == ids


@pytest.mark.parametrize("warm", [False, True], ids=["first", "after-eager-calls"])
def test_each_execution_is_shown_beside_those_outside(warm: bool) -> None:
    tool, net = Shown(), nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    with amanda.apply(tool):
        for _ in range(3 * warm):
            net(X)
        for _ in range(3):
            vmap(net)(X)
    assert tool.shapes == [(3, 2)] * 6


#: Derivatives of 2 sin(x) x, where the doubling has the gradient of the sine.
STRAIGHT: dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {
    "vmap": (lambda: vmap(function)(X), (2 * X.sin() * X).sum(1)),
    "grad": (lambda: grad(function)(X), X.cos() * X + 2 * X.sin()),
    "per sample": (lambda: vmap(grad(function))(X), X.cos() * X + 2 * X.sin()),
    "jacfwd": (lambda: jacfwd(function)(X), X.cos() * X + 2 * X.sin()),
    "jvp": (
        lambda: last(function, (X,), (torch.ones(3, 4),)),
        (X.cos() * X + 2 * X.sin()).sum(),
    ),
    "grad of grad": (
        lambda: grad(lambda x: grad(function)(x).sum())(X),
        2 * X.cos() - X.sin() * X,
    ),
}


@pytest.mark.parametrize("name", STRAIGHT)
def test_staged_edits_pass_gradients_straight_through(name: str) -> None:
    run, expected = STRAIGHT[name]
    with amanda.apply(Doubling()):
        found = run()
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(run(), expected) or name == "grad of grad"


@pytest.mark.parametrize("replaces", [False, True], ids=["inserted", "replaced"])
def test_staged_code_is_differentiated_if_asked(replaces: bool) -> None:
    tool = Doubling(replaces)
    with amanda.apply(tool), amanda.autodiff_enabled():
        found = vmap(grad(function))(X)
    torch.testing.assert_close(found, 2 * (X.cos() * X + X.sin()))


@pytest.mark.parametrize("replaces", [False, True], ids=["inserted", "replaced"])
def test_edits_on_the_host_are_refused_by_name(replaces: bool) -> None:
    expected = vmap(function)(X)
    with (
        amanda.apply(Doubling(replaces, staged=False)),
        pytest.raises(UnsupportedError, match=r"Doubling.*'sin'.*amanda\.staged"),
    ):
        vmap(function)(X)
    assert torch.equal(vmap(function)(X), expected)


def test_values_that_an_operator_writes_are_shown_and_not_edited() -> None:
    def writes(x: torch.Tensor) -> torch.Tensor:
        return (x * 1).sin_()

    tool = Shown()
    with amanda.apply(tool):
        assert torch.equal(vmap(writes)(X), X.sin())
    assert ("sin_", ("vmap",)) in tool.ops
    editing = Doubling()
    editing.add_inst_for_op(
        lambda context: (
            context.insert_after_op(amanda.staged(lambda y: y * 2))
            if context.op_type == "sin_"
            else None
        )
    )
    with amanda.apply(editing), pytest.raises(UnsupportedError, match="writes cannot be edited"):
        vmap(writes)(X)


def test_gradients_are_refused_by_name() -> None:
    tool = amanda.Tool()
    tool.sees_transforms = True
    tool.add_inst_for_op(lambda context: context.insert_before_backward_op(lambda *_: None))
    with (
        amanda.apply(tool),
        pytest.raises(UnsupportedError, match="'aligned_gradients' in mode 'transformed'"),
    ):
        grad(function)(X)


def test_other_tools_are_told() -> None:
    seen: list[str] = []
    other = amanda.Tool()
    other.add_inst_for_op(lambda context: seen.append(context.op_type))
    tool = Shown()
    with (
        amanda.apply(tool, other),
        pytest.warns(amanda.AmandaWarning, match="only tools with `sees_transforms`"),
    ):
        vmap(function)(X)
    assert [op for op, _ in tool.ops] == ["sin", "mul", "sum"]
    assert not {"sin", "mul"} & set(seen)
    assert not tool.not_seen()
    (line,) = other.not_seen()
    assert "sin (1 call), mul (1 call), sum (1 call)" in line


def test_a_function_that_a_transform_itself_calls_is_noted() -> None:
    tool = Shown()
    with amanda.apply(tool):
        vmap(torch.sin)(X)
    assert not tool.ops
    (line,) = tool.not_seen()
    assert "sin (1 call)" in line


@pytest.mark.filterwarnings("ignore:The compiled callable", "ignore:Compiled callables run eagerly")
def test_compiled_callables_with_transforms_run_eagerly() -> None:
    tool = Shown()
    compiled = torch.compile(lambda x: vmap(function)(x) + 1, backend="eager")
    with amanda.apply(tool) as handle, torch.no_grad():
        assert torch.equal(compiled(X), vmap(function)(X) + 1)
        gaps = [gap.why for gap in handle.coverage()["pytorch"] if "compiled" in gap.what]
    assert ("sin", ("vmap",)) in tool.ops
    assert any("run eagerly" in why or "runs eagerly" in why for why in gaps)


def test_parameters_are_weights_inside_transforms() -> None:
    net = nn.Sequential(nn.Linear(4, 2))
    found: dict[str, list[str]] = {}
    tool = amanda.Tool()
    tool.sees_transforms = True
    tool.add_inst_for_op(
        lambda context: found.update(
            {context.op_type: [weight.name for weight in context.weights.values()]}
        )
    )
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    with amanda.apply(tool):
        vmap(net)(X)
        assert found.pop("linear") == ["0.weight", "0.bias"]
        # A function of other tensors reads none of the model's.
        vmap(lambda own, x: functional_call(net, own, (x,)), (None, 0))(parameters, X)
