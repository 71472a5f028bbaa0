"""The ops that are seen: each call once, by its binding's name, however it is reached."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, relu as early_relu
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_core.testing.kit.tools import after, before, tool, watching

from .tensors import close, equal, grad_of, leaf

X = torch.randn(3, 3)


def ops_of(program: Callable[[], Any]) -> list[str]:
    seen, watch = watching()
    with amanda.apply(watch):
        program()
    return seen


def named(value: Any) -> str:
    """Return the part of a test's id that a parameter gives; not the address of a function."""
    return " ".join(value)[:40] if isinstance(value, list) else ""


# Wrappers in Python are transparent; early references are caught.

WRAPPED: list[tuple[Callable[[], Any], list[str]]] = [
    (lambda: F.relu(X), ["relu"]),
    (lambda: F.softmax(X, -1), ["softmax"]),
    (lambda: F.max_pool2d(X[None], 2), ["__getitem__", "max_pool2d"]),
    (lambda: torch.einsum("ij,jk->ik", X, X), ["einsum"]),
    (lambda: torch.norm(X), ["linalg_vector_norm"]),
    (lambda: X.split(1), ["split"]),
    (lambda: torch.tensordot(X, X), ["tensordot"]),
    (lambda: F.normalize(X), ["linalg_vector_norm", "clamp_min", "expand_as", "div"]),
    (lambda: X.unique(), ["_unique2"]),
    (lambda: early_relu(X), ["relu"]),
    (lambda: list(map(torch.neg, X.unbind())), ["unbind", "neg", "neg", "neg"]),
    (lambda: F.cross_entropy(X, X.argmax(1)), ["argmax", "cross_entropy_loss"]),
]


@pytest.mark.parametrize(("program", "names"), WRAPPED, ids=named)
def test_wrapper_is_the_bindings_inside_it(program: Any, names: list[str]) -> None:
    assert ops_of(program) == names


def test_bound_method_taken_before() -> None:
    bound = X.relu
    assert ops_of(bound) == ["relu"]


def test_attention_of_a_library_counts_inner_bindings_once() -> None:
    attention, q = nn.MultiheadAttention(4, 2), torch.randn(5, 1, 4)
    names = ops_of(lambda: attention(q, q, q))
    assert names.count("linear") == 2
    assert (names.count("bmm"), names.count("softmax")) == (2, 1)
    assert "multi_head_attention_forward" not in names
    fused = ops_of(lambda: attention(q, q, q, need_weights=False))
    assert fused.count("scaled_dot_product_attention") == 1


I = torch.tensor([1, 2])  # noqa: E741
OPERATORS: list[tuple[Callable[[], Any], list[str]]] = [
    (lambda: X + 1, ["add"]),
    (lambda: 1 + X, ["add"]),
    (lambda: 1 - X, ["rsub"]),
    (lambda: X**2, ["pow"]),
    (lambda: 2**X, ["pow"]),
    (lambda: X // 2, ["floor_divide"]),
    (lambda: X % 2, ["remainder"]),
    (lambda: 1 / X, ["reciprocal", "mul"]),
    (lambda: X @ X, ["matmul"]),
    (lambda: -X, ["neg"]),
    (lambda: abs(X), ["abs"]),
    (lambda: X[0], ["__getitem__"]),
    (lambda: X[:, None], ["__getitem__"]),
    (lambda: X.T, ["T"]),
    (lambda: X.mT, ["mT"]),
    (lambda: X.real, ["real"]),
    (lambda: X > 0, ["gt"]),
    (
        lambda: 1 > X,  # noqa: SIM300
        ["lt"],
    ),
    (lambda: X == X, ["eq"]),
    (lambda: X != 1, ["ne"]),
    (lambda: I & 1, ["bitwise_and"]),
    (lambda: 1 & I, ["bitwise_and"]),
    (lambda: I | I, ["bitwise_or"]),
    (lambda: ~I, ["bitwise_not"]),
    (lambda: operator.iadd(X.clone(), 1), ["clone", "add_"]),
    (lambda: X.clone().__setitem__(0, 1), ["clone", "__setitem__"]),
    (lambda: sum([X, X]), ["add", "add"]),
    (lambda: list(X), ["unbind"]),
    (lambda: X.float(), ["float"]),
    (lambda: X.detach(), ["detach"]),
    (lambda: torch.zeros(2), ["zeros"]),
    (lambda: torch.tensor([1.0]), ["tensor"]),
]


@pytest.mark.parametrize(("program", "names"), OPERATORS, ids=named)
def test_operator_of_python(program: Any, names: list[str]) -> None:
    assert ops_of(program) == names


# Not an op.


def test_metadata_and_questions_are_no_ops() -> None:
    x = leaf(3, 3)

    def program() -> None:
        _ = x.shape, x.ndim, x.dtype, x.device, x.requires_grad, x.grad, x.is_leaf, x.grad_fn
        _ = x.size(), x.dim(), x.stride(), x.numel(), len(x), x.is_contiguous(), x.data_ptr()
        _ = x.is_floating_point(), torch.is_tensor(x), torch.equal(x, x), torch.allclose(x, x)
        _ = x.tolist(), hash(x), x.storage_offset(), torch.result_type(x, 1), x.requires_grad_()
        x.register_hook(lambda grad: grad).remove()

    assert ops_of(program) == []


def test_item_is_no_op() -> None:
    assert ops_of(lambda: X.sum().item()) == ["sum"]


@pytest.mark.parametrize("show", [repr, str, "{}".format, lambda x: f"{x!r:>9}"])
def test_printing_is_quiet(show: Callable[[Any], str]) -> None:
    one, model = torch.tensor(1.5), nn.Linear(2, 2)
    values = X, nn.Parameter(X), one, X.exp().requires_grad_() * 2, [X], model
    plain = [show(value) for value in values]
    printed: list[str] = []

    def program() -> None:
        printed.extend(show(value) for value in values)

    assert ops_of(program) == []
    assert printed == plain


def test_backward_pass_is_no_ops_of_the_forward_program() -> None:
    x = leaf(3)
    assert ops_of(lambda: x.exp().sum().backward()) == ["exp", "sum"]
    assert ops_of(lambda: torch.autograd.grad(x.exp().sum(), x)) == ["exp", "sum"]


def test_code_of_hooks_and_functions_in_a_backward_pass_is_quiet() -> None:
    x = leaf(3)

    def program() -> None:
        y = x.exp()
        y.register_hook(lambda grad: grad * 2)
        y.sum().backward()

    assert ops_of(program) == ["exp", "sum"]


def fill(weight: torch.Tensor) -> torch.Tensor:
    """Fill a weight as libraries do, in a function of their own."""
    with torch.no_grad():
        return weight.copy_(torch.arange(weight.numel()).view(weight.shape))


class FromLibrary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2))
        self.apply(self._init_weights)
        self(torch.ones(2, 2))  # To find a shape, say.

    def _init_weights(self, module: nn.Module) -> None:
        fill(self.weight)

    @classmethod
    def from_pretrained(cls) -> FromLibrary:
        return load(cls())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def load(model: FromLibrary) -> FromLibrary:
    """Load weights into a model."""
    fill(model.weight).detach()
    return model


def test_what_a_library_does_to_build_or_load_a_model_is_not_the_model() -> None:
    zones: dict[str, set[str]] = {}
    with amanda.apply(tool(lambda c: zones.setdefault(c.zone, set()).add(c.op_type))):
        model = FromLibrary()
        assert zones["model"] == {"matmul"}
        FromLibrary.from_pretrained()
        model.load_state_dict(model.state_dict())
        assert zones["model"] - {"detach"} == {"matmul"}  # To save is none of these.
        assert {"arange", "view", "copy_"} <= zones["init"]
        model.weight.detach().mul_(2.0)
    assert "mul_" in zones["model"]


def test_zones_mark_what_is_not_the_model() -> None:
    zones: list[tuple[str, str]] = []
    model = nn.Linear(2, 1)
    optimizers = (
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False),
        torch.optim.Adam(model.parameters()),
    )
    model(torch.ones(1, 2)).sum().backward()
    with amanda.apply(tool(lambda c: zones.append((c.op_type, c.zone)))):
        model(torch.ones(1, 2))
        assert {zone for _, zone in zones} == {"model"}
        zones.clear()
        for optimizer in optimizers:
            optimizer.step()
        assert {zone for _, zone in zones} == {"optimizer"}
        zones.clear()
        nn.Linear(2, 2)
        assert {zone for _, zone in zones} == {"init"}
        zones.clear()
        model.double().to(torch.bfloat16)
        assert {zone for _, zone in zones} == {"init"}


# Ops outside torch's own bindings.


def test_dispatcher_ops() -> None:
    aten = torch.ops.aten
    assert ops_of(lambda: aten.relu(X)) == ["relu"]
    assert ops_of(lambda: aten.relu.default(X)) == ["relu"]


def test_library_op_registered_while_applied() -> None:
    seen, watch = watching()
    with torch.library._scoped_library("amanda_test", "FRAGMENT") as library, amanda.apply(watch):
        library.define("shift(Tensor x) -> Tensor")
        library.impl("shift", lambda x: x.sin() + 1, "CompositeExplicitAutograd")
        out = torch.ops.amanda_test.shift(X)
    assert seen == ["amanda_test::shift"]
    equal(out, X.sin() + 1)


def test_custom_op_registered_while_applied_is_one_op_however_it_is_called() -> None:
    seen, watch = watching()
    with amanda.apply(watch):

        @torch.library.custom_op("amanda_test::wave", mutates_args=())
        def wave(x: torch.Tensor) -> torch.Tensor:
            return x.cos() * 2

        wave(X)
        torch.ops.amanda_test.wave(X)
        torch.ops.amanda_test.wave.default(X)
    assert seen == ["amanda_test::wave"] * 3
    with amanda.apply(before("amanda_test::wave", lambda x: x * 2, [0])):
        out = wave(X)
    equal(out, (X * 2).cos() * 2)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x  # type: ignore[no-any-return]


class Separate(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [Square, Separate])
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_autograd_function_is_one_op(function: Any, early: bool) -> None:
    x, bound = leaf(3), function.apply
    name = function.__name__
    with amanda.apply(before(name, lambda v: v * 2, [0]), after(name, lambda v: v * 3)):
        seen = ops_of(lambda: (bound if early else function.apply)(x))
        out = (bound if early else function.apply)(x)
    assert seen == [name]
    out.sum().backward()
    equal(out.detach(), (x.detach() * 2) ** 2 * 3)
    equal(grad_of(x), 4 * x.detach())


def test_module_called_inside_a_function_is_seen() -> None:
    layer = nn.Linear(3, 3)

    class Container(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            return layer(x * 2).detach()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    assert ops_of(lambda: Container.apply(X)) == ["Container", "linear"]


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_script_is_one_op() -> None:
    script: Any = torch.jit.script(_scripted)
    model = torch.jit.trace(nn.Linear(3, 2), X)
    assert ops_of(lambda: script(X)) == ["_scripted"]
    assert len(ops_of(lambda: model(X))) == 1
    with amanda.apply(before("_scripted", lambda x: x * 2, [0])):
        out = script(X)
    equal(out, torch.relu(X * 2) + 1)


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + 1


# What Python does with models and tools.


def test_copied_and_pickled_models_are_models_like_others() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    seen, watch = watching()
    with amanda.apply(watch):
        expected = model(X)
        others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for other in others:
            seen.clear()
            out = other(X)
            assert seen == ["linear", "relu", "linear"]
            close(out.detach(), expected.detach())
    assert all("amanda" not in key for other in others for key in vars(other))


def test_checkpoint_is_a_container() -> None:
    x = leaf(3)
    for reentrant in (True, False):
        names = ops_of(lambda: checkpoint(torch.exp, x, use_reentrant=reentrant))  # noqa: B023
        # The checkpoint of PyTorch 2.10 and 2.11 makes empty tensors itself.
        assert [name for name in names if name != "empty"] == ["exp"]
