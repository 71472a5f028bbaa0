"""Tools without edits keep every bit: gradients of first and second order, and the graph itself.

The order in which the engine adds up gradients shows in the last bit, and depends on the nodes that
are there.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_core.testing.kit.tools import Everywhere, after, at_inputs, before, tool
from amanda_driver_torch.torch_internals.internals import make_saved_tensor

from .interceptors import under_both_interceptors
from .tensors import equal, grad_of, leaf, leaf_copy

Program = Callable[..., Any]

without_nodes = pytest.mark.skipif(
    make_saved_tensor is None,
    reason="this PyTorch cannot make saved tensors, so an edit adds a node, which groups sums",
)


def nothing(*values: Any) -> None:
    """Return None."""


def clones(*values: Any) -> Any:
    return tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in values)


#: Each uses its inputs several times, so that sums of gradients have several orders.
PROGRAMS: dict[str, Program] = {
    "one node": lambda a, b: (a.exp() * a + (a * b).sin() / b.cosh()) * a,
    "the same tensor twice": lambda a, b: (a * a).exp() * (a + b) * a,
    "linear": lambda a, b: F.linear(F.linear(a, b).tanh() * a, b, b[0]).tanh() * a,
    "linear of three dimensions": lambda a, b: (
        F.linear(a.view(2, 2, 4) * a[0], b, b[1]).exp() * a.view(2, 2, 4)
    ),
    "products of matrices": lambda a, b: (
        torch.matmul(
            a.view(1, 4, 4).expand(3, 4, 4).exp(), (b * a).view(1, 4, 4).expand(3, 4, 4)
        ).tanh()
        @ (a @ b)
    ),
    "convolution": lambda a, b: (
        F.conv2d(a.view(1, 1, 4, 4).exp(), b.view(1, 1, 4, 4), padding=2)[..., :4, :4] * a * b
    ),
    "softmax and norms": lambda a, b: (
        F.layer_norm(a * b, (4,), b[0]).softmax(-1) * a.log_softmax(0) * a.std() * (a * b).var(0)
    ),
    "several outputs": lambda a, b: (
        (a * b).max(1).values * (a * a).min(0).values * a.exp() * torch.stack([a, b, a]).sum(0)
    ),
    "in place": lambda a, b: (a * b).add_(a).mul_(0.5).tanh_() * a * (a + b).exp_() * a.exp(),
    "broadcast": lambda a, b: (a[0] * b + a[1].exp() * b.sum() / (b + a[:, :1]).cosh()) * a,
}


def gradients(program: Program, given: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    leaves = [leaf_copy(tensor) for tensor in given]
    result = program(*leaves)
    weights = torch.arange(1.0, 1.0 + result.numel()).reshape(result.shape).sin()
    first = torch.autograd.grad((result * weights).sum(), leaves, create_graph=True)
    torch.autograd.backward([(grad * grad.detach().cos()).sum() for grad in first])
    return [result, *first, *(tensor.grad for tensor in leaves)]


@without_nodes
@under_both_interceptors
@pytest.mark.parametrize("routine", [pytest.param(nothing, marks=pytest.mark.slow), clones])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_gradients_are_the_same_to_the_bit(
    name: str, routine: Any, interceptor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", interceptor)
    given = [leaf(4, 4), leaf(4, 4)]
    expected = gradients(PROGRAMS[name], given)
    calls: list[int] = []

    def counted(*values: Any) -> Any:
        calls.append(1)
        return routine(*values)

    with amanda.apply(Everywhere(counted)):
        for _ in range(3):
            equal(gradients(PROGRAMS[name], given), expected)
    assert len(calls) > 50


def nodes(tensor: torch.Tensor) -> Counter[str]:
    found, queue = set(), [tensor.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in found:
            found.add(node)
            queue += [following for following, _ in node.next_functions]
    return Counter(node.name() for node in found)


@pytest.mark.parametrize("routine", [nothing, clones])
@pytest.mark.parametrize(
    "name", sorted(set(PROGRAMS) - {"products of matrices", "convolution", "several outputs"})
)
def test_no_node_is_added_to_a_graph(name: str, routine: Any) -> None:
    a, b = leaf(4, 4), leaf(4, 4)
    expected = nodes(PROGRAMS[name](a, b))
    with amanda.apply(Everywhere(routine)):
        for _ in range(3):
            found = nodes(PROGRAMS[name](a, b))
            if routine is clones:
                # A copied view is not a view: it lacks its own node, and that of the identity.
                found.pop("AmandaEditBackward", None)
            assert found == expected


# Edited values replace the old ones.


@without_nodes
def test_gradients_reach_a_leaf_that_was_edited_wherever_its_stand_in_is_kept() -> None:
    kept: list[torch.Tensor] = []
    w, x = leaf(3), leaf(3)
    with amanda.apply(
        before("mul", lambda v: v * 2, [0]), before("mul", lambda *v: kept.extend(v))
    ):
        w * x
    (stand_in,) = (value for value in kept if not value.equal(x))
    (stand_in * stand_in).sum().backward()
    equal(grad_of(w), w.detach() * 4)
    assert stand_in.grad is None


def test_hooks_and_kept_gradients_of_an_edited_output() -> None:
    x, heard = leaf(3), list[torch.Tensor]()

    def hook(grad: torch.Tensor) -> torch.Tensor:
        heard.append(grad)
        return grad * 3

    with amanda.apply(after("exp", lambda v: v + 1)):
        y = x.exp()
        y.register_hook(hook)
        y.retain_grad()
        (y * y).sum().backward()
    equal(heard, [2 * (x.detach().exp() + 1)])
    equal(grad_of(y), heard[0] * 3)
    equal(grad_of(x), heard[0] * 3 * x.detach().exp())


def test_what_the_user_saves_is_not_disturbed() -> None:
    saved: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    def program() -> None:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            F.linear(leaf(2, 3, 4).exp(), leaf(5, 4), leaf(5)).sum().backward()

    program()
    expected = [*saved]
    for routine in (nothing, clones):
        saved.clear()
        with amanda.apply(Everywhere(routine)):
            program()
        assert saved == expected


def test_a_recomputed_block_is_edited_alike() -> None:
    w, x = leaf(4, 4), leaf(2, 4)

    def block(value: torch.Tensor) -> torch.Tensor:
        return F.linear(value, w).tanh()

    def run(*, again: bool) -> list[torch.Tensor]:
        w.grad = x.grad = None
        y = checkpoint(block, x * 1, use_reentrant=False) if again else block(x * 1)
        y.sum().backward()
        return [grad_of(w), grad_of(x)]

    with amanda.apply(before("linear", lambda v: v * 3, [1])):
        equal(run(again=True), run(again=False))


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 5)])
def test_an_edit_without_gradients_chooses_no_other_kernel(shape: tuple[int, ...]) -> None:
    asked: list[bool] = []
    w, x = leaf(5, 4), torch.randn(*shape)
    with (
        amanda.apply(
            before("matmul", clones),
            before("matmul", lambda *v: asked.extend(t.requires_grad for t in v)),
        ),
        torch.no_grad(),
    ):
        result = torch.matmul(x, w)
    assert asked == [False, True]
    assert not result.requires_grad


# The gradients at nodes equal those that an identity before the op would get.


def test_a_gradient_is_shown_in_the_shape_and_dtype_of_the_input() -> None:
    seen: list[torch.Tensor] = []
    x, y = leaf(4), leaf(3, 4).detach().double().requires_grad_()
    with amanda.apply(at_inputs("mul", seen.append, [0])):
        for _ in range(2):
            (x * y).sum().backward()
    assert [(g.shape, g.dtype) for g in seen] == [(x.shape, x.dtype)] * 2
    equal(seen[0] + seen[1], grad_of(x))


def test_a_composite_op_without_a_common_node_is_served_as_ever() -> None:
    seen: list[list[Any]] = []
    x, w, b = leaf(2, 4, 3), leaf(5, 4), leaf(5)

    def run() -> list[torch.Tensor]:
        for tensor in (x, w, b):
            tensor.grad = None
        F.linear(x.transpose(1, 2), w, b).tanh().sum().backward()
        return [grad_of(tensor) for tensor in (x, w, b)]

    expected = run()
    with amanda.apply(at_inputs("linear", lambda *grads: seen.append([*grads]))):
        for _ in range(2):
            equal(run(), expected)
    for grads in seen:
        equal([grads[0].transpose(1, 2), *grads[1:]], expected)


def test_a_replaced_op_gives_the_gradients_of_what_it_was_replaced_with() -> None:
    seen: list[torch.Tensor] = []
    x = leaf(3)

    def analyse(context: amanda.OpContext) -> None:
        context.replace_op(lambda v: v * v + v.sin() * v)
        context.insert_after_backward_op(seen.append, [0])

    with amanda.apply(tool(analyse, "exp")):
        x.exp().sum().backward()
    equal(seen, [grad_of(x)])


def test_what_arrives_at_several_outputs_is_edited_before_the_node_sees_it() -> None:
    seen: list[torch.Tensor] = []
    x = leaf(3, 4)

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda *grads: [g if g is None else g * 2 for g in grads])

    def raw(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda g: seen.append(g), [0])

    tools = (tool(analyse, "var_mean"), tool(raw, "VarMeanBackward0", backward=True))
    with amanda.apply(*tools):
        for _ in range(2):
            variance, mean = torch.var_mean(x, 1)
            (variance + mean).sum().backward()
    equal(seen, [torch.full((3,), 2.0)] * 2)
