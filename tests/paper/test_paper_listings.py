"""Listings of the paper as programs that run, and its signatures.

If a listing cannot run as printed, `docs/paper.md` and this file have the corrected line. Long
because it is one document from beginning to end.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amanda
from amanda_core.errors import ActionError, AmandaError

EMPTY = inspect.Parameter.empty


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return names and defaults of positional parameters, then ``*x`` and ``**x``."""
    signs: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    return [
        (signs.get(parameter.kind, "") + name, parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]


# Listing 1: a pruning tool on PyTorch.


def magnitude_mask(tensor: Tensor) -> Tensor:
    """Return 0 for the smaller half of the elements."""
    return (tensor.abs() > tensor.abs().median()).to(tensor.dtype)


def tf_type(context: amanda.OpContext) -> None:
    """Apply the first lines of listing 6."""
    op = context.get_op()
    context["type"] = op.type.lower()
    if not context.is_forward():
        backward_op = context.get_backward_op()
        if backward_op.type == "Conv2DBackpropFilter":
            context["backward_type"] = "conv2d_backward"


class PruningTool(amanda.Tool):
    #: Printed is 0, which is the activation's gradient in PyTorch; the weight's is 1.
    weight_grad = 1

    # As printed without super().__init__().
    def __init__(self) -> None:
        self.depends_on(amanda.tools.mapping.MappingTool(rules=[["tensorflow", tf_type]]))
        # register callbacks in forward and backward execution
        self.add_inst_for_op(self.instrumentation)
        self.add_inst_for_op(self.backward_instrumentation, backward=True, require_outputs=True)
        self.analysed: list[Tensor | None] = []

    # arbitrary pruning algorithm
    def get_mask(self, tensor: Tensor) -> Tensor:
        return magnitude_mask(tensor)

    # analysis routines
    def instrumentation(self, context: amanda.OpContext) -> None:
        if context["type"] in ["conv2d"]:  # noqa: FURB171  As printed.
            weight = context.get_inputs()[1]
            mask = self.get_mask(weight)
            context["mask"] = mask
            context.insert_before_op(self.mask_forward_weight, inputs=[1], mask=mask)

    def backward_instrumentation(self, context: amanda.OpContext) -> None:
        if context["backward_type"] in ["conv2d_backward"]:  # noqa: FURB171
            weight_grad = context.get_grad_inputs()[self.weight_grad]
            self.analysed.append(None if weight_grad is None else weight_grad.clone())
            mask = context["mask"]
            context.insert_after_backward_op(
                self.mask_backward_gradient, grad_inputs=[self.weight_grad], mask=mask
            )

    # instrumentation routines
    def mask_forward_weight(self, weight: Tensor, mask: Tensor) -> Tensor:
        return weight * mask

    def mask_backward_gradient(self, weight_grad: Tensor, mask: Tensor) -> Tensor:
        return weight_grad * mask


class PrintedPruningTool(PruningTool):
    weight_grad = 0


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x)).mean((2, 3))
        y = self.head(x)
        assert isinstance(y, Tensor)
        return y


Weights = dict[str, Tensor]


def by_hand(weights: Weights, masks: Weights, x: Tensor) -> tuple[Tensor, Weights]:
    """Run the pruned network in plain PyTorch; return its output and a gradient for each weight.

    The weights of the convolutions are masked before they enter the graph, and their gradients
    after they have left it.
    """
    leaves = {
        name: (weight * masks[name] if name in masks else weight).clone().requires_grad_()
        for name, weight in weights.items()
    }
    y = torch.relu(F.conv2d(x, leaves["first.weight"], leaves["first.bias"], padding=1))
    y = torch.relu(F.conv2d(y, leaves["second.weight"])).mean((2, 3))
    y = F.linear(y, leaves["head.weight"], leaves["head.bias"])
    torch.autograd.backward(y.square().sum())
    gradients = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        gradients[name] = leaf.grad * masks[name] if name in masks else leaf.grad
    return y.detach(), gradients


def test_listing_1_masks_weights_and_their_gradients() -> None:
    model, tool = Network(), PruningTool()
    names = ("first.weight", "second.weight")
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    masks = {name: magnitude_mask(weights[name]) for name in names}
    assert all(0 < mask.sum() < mask.numel() for mask in masks.values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amanda.apply(tool):
        for step in range(3):
            x = torch.rand(2, 3, 6, 6)
            y = model(x)
            optimizer.zero_grad()
            torch.autograd.backward(y.square().sum())
            # The reference: masks of the first weights throughout, for analysis ran once.
            expected, gradients = by_hand(weights, masks, x)
            torch.testing.assert_close(y.detach(), expected, rtol=0, atol=0)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, gradients[name]), (step, name)
            optimizer.step()
            weights = {name: w - 0.1 * gradients[name] for name, w in weights.items()}
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.detach(), weights[name])
                weights[name] = parameter.detach().clone()
    # Fine-tuned with masked gradients: what is masked has never moved.
    torch.manual_seed(0)
    original = Network()
    for name in names:
        start, end = original.get_parameter(name), model.get_parameter(name)
        moved = start != end
        assert moved.any()
        assert not moved[masks[name] == 0].any()


def test_listing_1_sees_the_gradient_before_it_is_masked() -> None:
    model, tool = Network(), PruningTool()
    with amanda.apply(tool):
        torch.autograd.backward(model(torch.rand(2, 3, 6, 6)).square().sum())
    second, first = tool.analysed
    assert first is not None
    assert second is not None
    for name, seen in (("first.weight", first), ("second.weight", second)):
        masked = model.get_parameter(name).grad
        assert masked is not None
        assert torch.equal(masked, seen * magnitude_mask(model.get_parameter(name).detach()))
        assert not torch.equal(masked, seen)


def test_listing_1_leaves_the_model_alone() -> None:
    model = Network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.rand(2, 3, 6, 6)
    dense = model(x)
    with amanda.apply(PruningTool()):
        assert not torch.equal(model(x), dense)
    assert torch.equal(model(x), dense)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_listing_1_as_printed_masks_the_gradient_of_the_activation() -> None:
    # The first raw gradient of a convolution is its input's. A weight of the input's shape lets
    # the printed tool run.
    x = torch.rand(4, 3, 3, 3, requires_grad=True)
    convolution = nn.Conv2d(3, 4, 3, padding=1)
    weight = convolution.weight.detach().clone()
    mask = magnitude_mask(weight)
    tool = PrintedPruningTool()
    with amanda.apply(tool):
        y = convolution(x)
        torch.autograd.backward(y.square().sum())

    leaf, masked_weight = x.detach().clone().requires_grad_(), (weight * mask).requires_grad_()
    assert convolution.bias is not None
    y = F.conv2d(leaf, masked_weight, convolution.bias.detach(), padding=1)
    torch.autograd.backward(y.square().sum())
    assert leaf.grad is not None
    (seen,) = tool.analysed
    assert seen is not None
    assert torch.equal(seen, leaf.grad)
    assert x.grad is not None
    assert torch.equal(x.grad, leaf.grad * mask)
    assert convolution.weight.grad is not None
    assert masked_weight.grad is not None
    assert torch.equal(convolution.weight.grad, masked_weight.grad)


def test_listing_1_as_printed_finds_no_gradient_of_a_first_layer() -> None:
    # The network's own input wants no gradient: the routine is not called.
    tool = PrintedPruningTool()
    convolution = nn.Conv2d(3, 4, 3)
    with amanda.apply(tool):
        torch.autograd.backward(convolution(torch.rand(1, 3, 6, 6)).sum())
    assert tool.analysed == [None]


def test_listing_1_with_aligned_positions() -> None:
    # The portable way to say it: input 1 of the forward op.
    class AlignedPruningTool(PruningTool):
        def instrumentation(self, context: amanda.OpContext) -> None:
            super().instrumentation(context)
            if "mask" in context:
                context.insert_after_backward_op(
                    self.mask_backward_gradient, grad_inputs=[1], mask=context["mask"]
                )

        def backward_instrumentation(self, context: amanda.OpContext) -> None:
            pass

    model, x = Network(), torch.rand(2, 3, 6, 6)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    masks = {n: magnitude_mask(weights[n]) for n in ("first.weight", "second.weight")}
    with amanda.apply(AlignedPruningTool()):
        torch.autograd.backward(model(x).square().sum())
    _, gradients = by_hand(weights, masks, x)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[name]), name


# Listing 2: registration APIs.


def test_listing_2_signatures() -> None:
    assert parameters(amanda.Tool.add_inst_for_op) == [
        ("self", EMPTY),
        ("callback", EMPTY),
        ("backward", False),
        ("require_outputs", False),
    ]
    assert parameters(amanda.Tool.depends_on) == [("self", EMPTY), ("*tools", EMPTY)]


def test_listing_2_registers_at_four_points() -> None:
    order: list[str] = []
    tool = amanda.Tool()
    for name, backward, require_outputs in [
        ("after_backward_op", True, True),
        ("before_backward_op", True, False),
        ("after_forward_op", False, True),
        ("before_forward_op", False, False),
    ]:

        def routine(context: amanda.OpContext, name: str = name) -> None:
            order.append(name)

        assert tool.add_inst_for_op(routine, backward, require_outputs) is None  # type: ignore[func-returns-value]
    x = torch.rand(2, requires_grad=True) * 1
    with amanda.apply(tool):
        y = torch.relu(x)
        assert order == ["before_forward_op", "after_forward_op"]
        order.clear()
        torch.autograd.backward(y, y.detach())
    # `detach` is an operator, too, and so are the backward ones of `* 1`, which came before.
    assert order == [
        "before_forward_op",
        "after_forward_op",
        "before_backward_op",
        "after_backward_op",
    ]


def test_listing_2_dependencies_run_first() -> None:
    order: list[str] = []

    class First(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(lambda context: order.append("first"))

    class Second(amanda.Tool):
        def __init__(self, *tools: amanda.Tool) -> None:
            self.add_inst_for_op(lambda context: order.append("second"))
            self.depends_on(*tools)

    one = First()
    with amanda.apply(Second(one), one):
        torch.relu(torch.rand(2).neg_())
    assert order == ["first", "second"] * 3


# Listing 3: instrumentation APIs.

PRINTED = {
    "insert_before_op": ("inputs",),
    "insert_after_op": ("outputs",),
    "insert_before_backward_op": ("grad_out", "grad_outputs"),
    "insert_after_backward_op": ("grad_in", "grad_inputs"),
    "replace_op": ("inputs",),
    "replace_backward_op": ("grad_out", "grad_outputs"),
}


@pytest.mark.parametrize("method", PRINTED)
def test_listing_3_signatures(method: str) -> None:
    function = getattr(amanda.OpContext, method)
    names = [name for name, _ in parameters(function)]
    assert names[:2] == ["self", "func"]
    assert names[2] in PRINTED[method]
    assert names[3:] == ["**kwargs"]
    # Every printed spelling is a parameter of its own and does not end up in kwargs.
    assert set(PRINTED[method]) <= set(inspect.signature(function).parameters)
    assert issubclass(amanda.OpContext, dict)


def call(method: str, **positions: list[int]) -> tuple[list[Any], Tensor, Tensor | None]:
    """Apply an action to ``x * w``; return what the routine received, the result, and x's
    gradient.
    """
    calls: list[Any] = []
    replaces = method.startswith("replace")

    def routine(*values: Tensor, factor: float) -> Any:
        calls.append(tuple(v.item() for v in values))
        changed = tuple(value * factor for value in values)
        if not replaces:
            return changed
        return (changed[0], None) if "backward" in method else changed[0]

    def analysis(context: amanda.OpContext) -> None:
        if context["type"] == "mul":
            getattr(context, method)(routine, **positions, factor=10.0)

    tool = amanda.Tool()
    tool.add_inst_for_op(analysis)
    x, w = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    with amanda.apply(tool):
        y = x * w
        torch.autograd.backward(y, torch.tensor(7.0))
    return calls, y.detach(), x.grad


@pytest.mark.parametrize(
    ("method", "positions", "calls", "result", "gradient"),
    [
        ("insert_before_op", {"inputs": [0]}, [(2.0,)], 60.0, 21.0),
        ("insert_before_op", {"inputs": [1]}, [(3.0,)], 60.0, 210.0),
        ("insert_before_op", {"inputs": [0, 1]}, [(2.0, 3.0)], 600.0, 210.0),
        ("insert_after_op", {"outputs": [0]}, [(6.0,)], 60.0, 21.0),
        ("insert_before_backward_op", {"grad_out": [0]}, [(7.0,)], 6.0, 210.0),
        ("insert_before_backward_op", {"grad_outputs": [0]}, [(7.0,)], 6.0, 210.0),
        ("insert_after_backward_op", {"grad_in": [0]}, [(21.0,)], 6.0, 210.0),
        ("insert_after_backward_op", {"grad_inputs": [0]}, [(21.0,)], 6.0, 210.0),
        ("insert_after_backward_op", {"grad_inputs": [1]}, [(14.0,)], 6.0, 21.0),
        ("replace_op", {"inputs": [0]}, [(2.0,)], 20.0, 70.0),
        ("replace_backward_op", {"grad_out": [0]}, [(7.0,)], 6.0, 70.0),
        ("replace_backward_op", {"grad_outputs": [0]}, [(7.0,)], 6.0, 70.0),
    ],
)
def test_listing_3_actions(
    method: str,
    positions: dict[str, list[int]],
    calls: list[tuple[float, ...]],
    result: float,
    gradient: float,
) -> None:
    got, y, grad = call(method, **positions)
    assert got == calls
    assert y.item() == result
    assert grad is not None
    assert grad.item() == gradient


@pytest.mark.parametrize(
    ("method", "names"),
    [(method, names) for method, names in PRINTED.items() if len(names) == 2],
)
def test_listing_3_only_one_spelling_at_a_time(method: str, names: tuple[str, str]) -> None:
    with pytest.raises(ActionError, match=f"Both {names[1]} and {names[0]}"):
        call(method, **{name: [0] for name in names})


def test_listing_3_replacement_by_the_identity_removes_an_operator() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda c: c.replace_op(lambda x: x, inputs=[0]) if c["type"] == "relu" else None
    )
    x = torch.tensor([-1.0, 2.0])
    with amanda.apply(tool):
        assert torch.equal(torch.relu(x), x)


# Listing 4: inspection APIs.


def test_listing_4_signatures() -> None:
    for method in (
        "get_op",
        "get_op_id",
        "get_inputs",
        "get_outputs",
        "get_backward_op",
        "get_backward_op_id",
        "get_grad_outputs",
        "get_grad_inputs",
    ):
        assert parameters(getattr(amanda.OpContext, method)) == [("self", EMPTY)], method


def test_listing_4_tells_everything_of_an_operator() -> None:
    x, w = torch.rand(5, 3), torch.rand(4, 3, requires_grad=True)
    seen: list[dict[str, Any]] = []

    def forward(context: amanda.OpContext) -> None:
        if context["type"] != "linear":
            return
        assert context.get_op().__name__ == "linear"
        assert context.get_inputs()[0] is x
        assert context.get_inputs()[1] is w
        assert torch.equal(context.get_outputs()[0], x @ w.T)
        for method in ("backward_op", "backward_op_id", "grad_outputs", "grad_inputs"):
            assert getattr(context, f"get_{method}")() is None
        seen.append({"op_id": context.get_op_id()})

    def backward(context: amanda.OpContext) -> None:
        if context["backward_type"] != "linear_backward":
            return
        assert context.get_backward_op().__name__ == "MmBackward0"
        assert context.get_op().__name__ == "linear"
        assert context.get_inputs()[1] is w
        (gradient,) = context.get_grad_outputs()
        assert torch.equal(gradient, torch.ones(5, 4))
        # There is none for x.
        first, second = context.get_grad_inputs()
        assert first is None
        assert torch.equal(second, x.T @ torch.ones(5, 4))
        seen.append({"op_id": context.get_op_id(), "backward_op_id": context.get_backward_op_id()})

    tool = amanda.Tool()
    tool.add_inst_for_op(forward, require_outputs=True)
    tool.add_inst_for_op(backward, backward=True, require_outputs=True)
    with amanda.apply(tool), amanda.cache_disabled():
        for _ in range(2):
            torch.autograd.backward(F.linear(x, w), torch.ones(5, 4))
    assert len(seen) == 4
    assert seen[:2] == seen[2:]
    assert seen[0]["op_id"] == seen[1]["op_id"]


# Listing 5: control APIs.


def test_listing_5_signatures() -> None:
    assert parameters(amanda.apply) == [("*tools", EMPTY)]
    assert amanda.tool.apply is amanda.apply
    for function in (
        amanda.disabled,
        amanda.enabled,
        amanda.cache_disabled,
        amanda.cache_enabled,
    ):
        inspect.signature(function).bind()


def test_listing_5_switches() -> None:
    analysed: list[str] = []
    executed: list[str] = []
    tool = amanda.Tool()

    def analysis(context: amanda.OpContext) -> None:
        analysed.append(context["type"])
        context.insert_before_op(lambda *inputs: executed.append("routine"))

    tool.add_inst_for_op(analysis)
    x = torch.rand(2)

    def network() -> tuple[int, int]:
        analysed.clear()
        executed.clear()
        torch.relu(x)
        return len(analysed), len(executed)

    with amanda.apply(tool):
        assert network() == (1, 1)
        assert network() == (0, 1)
        with amanda.disabled():
            assert network() == (0, 0)
            with amanda.enabled():
                assert network() == (0, 1)
        with amanda.cache_disabled():
            assert network() == (1, 1)
            assert network() == (1, 1)
            with amanda.cache_enabled():
                assert network() == (0, 1)
        assert network() == (0, 1)
    assert network() == (0, 0)


# Listing 6: context mapping.


def torch_type(context: amanda.OpContext) -> None:
    context["type"] = context.get_op().__name__
    if not context.is_forward():
        backward_op = context.get_backward_op()
        if backward_op.__name__ == "ConvolutionBackward0":
            context["backward_type"] = "conv2d_backward"


def torch_get_shape(context: amanda.OpContext) -> None:
    inputs = context.get_inputs()
    if inputs is not None:
        context["shapes"] = [tuple(i.shape) for i in inputs if isinstance(i, Tensor)]


def torch_get_mask(context: amanda.OpContext) -> None:
    context["get_mask"] = magnitude_mask


def tf_get_shape(context: amanda.OpContext) -> None:
    context["shapes"] = "tensorflow's"


def tf_get_mask(context: amanda.OpContext) -> None:
    context["get_mask"] = "tensorflow's"


def test_listing_6_rules_of_the_own_namespace_only() -> None:
    contexts: list[amanda.OpContext] = []

    class MappedPruningTool(amanda.Tool):
        def __init__(self) -> None:
            self.depends_on(
                amanda.tools.mapping.MappingTool(
                    rules=[
                        ["tensorflow", tf_type],
                        ["tensorflow", tf_get_shape],
                        ["tensorflow", tf_get_mask],
                        ["pytorch", torch_type],
                        ["pytorch", torch_get_shape],
                        ["pytorch", torch_get_mask],
                    ]
                )
            )
            self.add_inst_for_op(self.instrumentation)
            self.add_inst_for_op(self.backward_instrumentation, backward=True)

        def instrumentation(self, context: amanda.OpContext) -> None:
            assert context.namespace.startswith("pytorch/")
            if context["type"] == "conv2d":
                assert context["shapes"] == [(1, 3, 5, 5), (4, 3, 3, 3), (4,)]
                assert context["get_mask"] is magnitude_mask
                contexts.append(context)

        def backward_instrumentation(self, context: amanda.OpContext) -> None:
            if context["backward_type"] == "conv2d_backward":
                assert context.forward is contexts[0]
                contexts.append(context)

    with amanda.apply(MappedPruningTool()):
        torch.autograd.backward(nn.Conv2d(3, 4, 3)(torch.rand(1, 3, 5, 5)).sum())
    assert len(contexts) == 2


@pytest.mark.parametrize(
    ("namespace", "fires"),
    [
        ("pytorch", True),
        ("pytorch/*/eager", True),
        (f"pytorch/{torch.__version__.split('.')[0]}", True),
        ("pytorch/0.4", False),
        ("pytorch/*/graph", False),
        ("tensorflow", False),
        ("torch", False),
        ("py", False),
    ],
)
def test_listing_6_namespaces(namespace: str, fires: bool) -> None:
    # The rule writes over the driver's word.
    def rule(context: amanda.OpContext) -> None:
        context["type"] = "mine"

    types: list[str] = []
    tool = amanda.Tool()
    tool.depends_on(amanda.tools.mapping.MappingTool(rules=[[namespace, rule]]))
    tool.add_inst_for_op(lambda context: types.append(context["type"]))
    x = torch.rand(2)
    with amanda.apply(tool):
        torch.relu(x)
    assert types == ["mine" if fires else "relu"]


def test_listing_6_the_mapping_tool_is_an_attribute() -> None:
    program = """
        import sys
        import amanda

        tool = amanda.tools.mapping.MappingTool(rules=[])
        assert isinstance(tool, amanda.Tool)
        from amanda.tools.mapping import MappingTool

        assert type(tool) is MappingTool
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


# What the text around the listings says.


def test_a_tool_need_not_be_a_subclass() -> None:
    counts: list[int] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(lambda *i: counts.append(1)))
    x = torch.rand(2)
    with amanda.apply(tool):
        torch.relu(torch.relu(x))
    assert counts == [1, 1]


def test_inserted_code_takes_no_part_in_the_backward_program() -> None:
    # Section 5.2: an L1 norm of an activation adds nothing to the backward program.
    norms: list[Tensor] = []
    tool = amanda.Tool()

    def analysis(context: amanda.OpContext) -> None:
        if context["type"] == "relu":
            context.insert_after_op(lambda y: norms.append(y.abs().sum()))

    tool.add_inst_for_op(analysis)
    x = torch.rand(3, requires_grad=True)
    with amanda.apply(tool):
        torch.autograd.backward(torch.relu(x).sum())
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3))
    assert torch.equal(norms[0], x.detach().abs().sum())
    assert not norms[0].requires_grad


def test_errors_have_one_root() -> None:
    assert issubclass(ActionError, AmandaError)
    assert amanda.AmandaError is AmandaError
