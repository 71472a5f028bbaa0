"""The driver reads nothing that raises, rebuilds or dispatches where plain torch does not.

A view whose base was written in place gets a new node when its node is next read, or, if it was
made without gradients or by `unbind`, raises then.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.masked import masked_tensor

import amanda
from amanda_core.testing.kit.tools import analysed
from amanda_driver_torch.facts import FACTS
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.tensor_attributes import is_weight

from .interceptors import under_both_interceptors
from .unchanged_by_tools import CHANGING_NOTHING, same_under, unlike_plain

TOOLS = pytest.mark.parametrize("tool", CHANGING_NOTHING)


@pytest.fixture(autouse=True)
def _interceptor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "interceptor" in request.fixturenames:
        monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", request.getfixturevalue("interceptor"))


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(5, 3))


def a_row_in_place() -> Any:
    weight = parameter()
    with torch.no_grad():
        weight[3] += 1
    return weight


def rows_in_place() -> Any:
    weight = parameter()
    with torch.no_grad():
        weight[2:] *= 2
    return weight


def descent_by_rows() -> Any:
    weight, x = parameter(), torch.randn(4, 5)
    for _ in range(3):
        (x @ weight).square().mean().backward()
        assert weight.grad is not None
        with torch.no_grad():
            for i in range(5):
                weight[i] -= 0.1 * weight.grad[i]
        weight.grad = None
    return weight


def a_written_view_as_operand() -> Any:
    weight = parameter()
    with torch.no_grad():
        view = weight[1:]
        view += 1
        return torch.zeros(4, 3) + view


def a_base_that_wants_gradients_late() -> Any:
    base = torch.ones(3)
    with torch.no_grad():
        view = base[:2]
    base.requires_grad_()
    return view * 2, view.reshape(1, 2)


def views_of_inference_mode() -> Any:
    a = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        of_leaf, inside = a[:2], torch.ones(3)[:2]
        inside.mul_(2)
        product = of_leaf * inside
    return product, of_leaf.clone(), inside[:1], of_leaf * 2


def a_masked_tensor() -> Any:
    x: Any = masked_tensor(torch.arange(3.0), torch.tensor([True, False, True]), requires_grad=True)
    y = (x * 2).sum()
    y.backward()
    assert x.grad is not None
    return y.get_data(), x.grad.get_data()


def a_context_with_names_of_torchs() -> Any:
    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.name, ctx.variable = "mine", x.shape
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    x = torch.ones(3, requires_grad=True)
    Named.apply(F.relu(x)).sum().backward()
    return x.grad


REPRODUCTIONS = [
    a_row_in_place,
    rows_in_place,
    descent_by_rows,
    a_written_view_as_operand,
    a_base_that_wants_gradients_late,
    views_of_inference_mode,
    pytest.param(
        a_masked_tensor, marks=pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
    ),
    a_context_with_names_of_torchs,
]


@under_both_interceptors
@TOOLS
@pytest.mark.parametrize("program", REPRODUCTIONS)
def test_legal_programs_run(program: Callable[[], Any], tool: str, interceptor: str) -> None:
    same_under(tool, program)


# The class: views of every origin, whose base is written or not, in ops of every kind.


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x[:2], x[2:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.cat([torch.zeros(2) if g is None else g for g in grads])


def without_gradients(base: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return base[:2]


def in_inference_mode(base: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return base[:2]


def leaf_of_its_own(base: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        view = base.detach()[:2]
    return view.requires_grad_()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "recorded": lambda base: base[:2],
    "without gradients": without_gradients,
    "in inference mode": in_inference_mode,
    "one of several": lambda base: base.view(2, 2).unbind()[0],
    "of a custom function": lambda base: Halves.apply(base)[0],
    "a leaf of its own": leaf_of_its_own,
    "detached": lambda base: base.detach()[:2],
}


def written_plainly(base: torch.Tensor) -> None:
    with torch.no_grad():
        base.add_(1)


def written_with_gradients(base: torch.Tensor) -> None:
    if not base.is_leaf:
        base.mul_(2)


WRITES: dict[str, Callable[[torch.Tensor], None]] = {
    "not written": lambda base: None,
    "written without gradients": written_plainly,
    "written with gradients": written_with_gradients,
}

#: Differentiable, not differentiable, handing the view back, viewing it, writing it, lists.
USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "differentiable": lambda v: (v * 2).exp() + v,
    "second operand": lambda v: torch.zeros(2) + v,
    "compared": lambda v: v > 1,
    "argmax": lambda v: v.argmax(),
    "handed back": lambda v: v.contiguous(),
    "handed back in a list": lambda v: torch.atleast_1d([v, v]),
    "viewed": lambda v: v.view(1, 2) * 2,
    "split": lambda v: torch.stack(v.unbind()),
    "in a list": lambda v: torch.cat([v, v]),
    "zeros like it": torch.zeros_like,
    "written": lambda v: v.mul_(3),
    "an item written": lambda v: v.__setitem__(0, 7.0),
    "a part written": lambda v: v[:1].add_(1),
    "written into another": lambda v: torch.zeros(2).copy_(v),
    "detached": lambda v: v.detach() + 1,
}
MODES: dict[str, Callable[[], Any]] = {
    "with gradients": torch.enable_grad,
    "without": torch.no_grad,
    "inference": torch.inference_mode,
}


def program(view: str, leaf: bool, write: str, use: str, mode: str) -> Callable[[], Any]:
    def run() -> Any:
        source = torch.arange(1.0, 5.0).requires_grad_()
        base = source if leaf else source * 1
        seen = VIEWS[view](base)
        WRITES[write](base)
        with MODES[mode]():
            result = USES[use](seen)
        results = [result, seen] if isinstance(result, torch.Tensor) else [seen]
        wanted = [t for t in results if t.requires_grad and t.is_floating_point()]
        if wanted:
            sum((t * t).sum() for t in wanted).backward()  # type: ignore[union-attr]
        return [*results, source.grad, base]

    return run


#: Views, whether the base is a leaf, and what is done with both.
CASES = list(itertools.product(VIEWS, (True, False), WRITES, USES, MODES))


def behave_as_plain(tool: str, cases: list[Any]) -> None:
    assert unlike_plain(tool, {str(case): program(*case) for case in cases}) == []


@under_both_interceptors
@TOOLS
def test_views_behave_as_in_plain_torch(tool: str, interceptor: str) -> None:
    chosen = random.Random(tool + interceptor).sample(CASES, 20)
    behave_as_plain(tool, chosen)


@pytest.mark.exhaustive
@under_both_interceptors
@TOOLS
@pytest.mark.parametrize("view", VIEWS)
def test_all_views_behave_as_in_plain_torch(view: str, tool: str, interceptor: str) -> None:
    behave_as_plain(tool, [case for case in CASES if case[0] == view])


class Reticent(torch.Tensor):
    """Raises if its attributes are read from outside."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "register_hook", "storage_offset"):
            raise RuntimeError("nobody reads this")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_attributes_of_a_subclass_are_not_read() -> None:
    x = torch.randn(2, 3).as_subclass(Reticent)
    w = torch.randn(3, 3, requires_grad=True)
    plain = x.as_subclass(torch.Tensor)
    expected = torch.autograd.grad((plain @ w).tanh().sum(), w)[0]
    for make in CHANGING_NOTHING.values():
        with amanda.apply(make()):
            for _ in range(3):
                loss = (x @ w).tanh().sum()
                x.clone().view(3, 2).add_(0)
                found = torch.autograd.grad(loss.as_subclass(torch.Tensor), w)[0]
                assert torch.equal(found.as_subclass(torch.Tensor), expected)


def test_a_copy_on_write_tensor_is_not_copied() -> None:
    for make in CHANGING_NOTHING.values():
        base = torch.ones(3)
        lazy = torch._lazy_clone(base)
        with amanda.apply(make()):
            (lazy + 1).mul_(2)
        assert vars(torch._C)["_is_cow_tensor"](lazy)


def test_a_stale_view_gets_its_node_when_plain_torch_makes_it() -> None:
    def program() -> list[int]:
        x = torch.ones(4, requires_grad=True)
        base = x * 1
        view = base[:2]
        base.mul_(2)
        start = torch._C._autograd._get_sequence_nr()
        (view > 1, view.argmax(), view.contiguous())
        before = torch._C._autograd._get_sequence_nr() - start
        view.exp()
        return [before, torch._C._autograd._get_sequence_nr() - start]

    expected = program()
    assert expected[0] == 0
    for tool in ("empty", "watching", "returning None, raw"):
        with amanda.apply(CHANGING_NOTHING[tool]()):
            assert program() == expected


@pytest.mark.parametrize("grad", [True, False])
def test_rows_of_a_parameter_tell_ops_apart_with_and_without_gradients(grad: bool) -> None:
    weight = parameter()
    contexts, tool = analysed()
    with amanda.apply(tool), torch.set_grad_enabled(grad):
        for _ in range(3):
            for i in range(5):
                torch.add(torch.zeros(3), weight[i])
    assert [c.op_type for c in contexts].count("add") == 5


def test_a_view_that_is_a_leaf_itself_is_a_weight() -> None:
    flat = torch.zeros(6)
    with torch.no_grad():
        views = [flat[:3].requires_grad_(), flat[3:].requires_grad_()]
    assert all(is_weight(view) for view in views)
    contexts, tool = analysed()
    with amanda.apply(tool):
        for view in views:
            torch.add(torch.zeros(3), view)
    assert [c.op_type for c in contexts].count("add") == 2


@TOOLS
def test_nothing_that_is_read_is_kept(tool: str) -> None:
    with amanda.apply(CHANGING_NOTHING[tool]()):
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        y.mul_(2)
        alive = weakref.ref(x)
        del x, y
        gc.collect()
        assert alive() is None


@under_both_interceptors
def test_late_routines_find_the_gradients_of_leaves_and_views(interceptor: str) -> None:
    seen: dict[str, list[float]] = {}

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type in ("mul", "exp", "mul_"):
            name = context.op_type
            context.insert_after_backward_op(
                lambda grad: seen.setdefault(name, []).append(float(grad.sum())), grad_inputs=[0]
            )

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse, require_outputs=True)
    with amanda.apply(tool):
        x = torch.ones(4, requires_grad=True)
        base = x * 3
        view = base[:2]
        base.mul_(2)
        view.exp().sum().backward()
    e6 = float(torch.tensor(6.0).exp())
    assert seen == {
        "exp": pytest.approx([2 * e6]),
        "mul_": pytest.approx([4 * e6]),
        "mul": pytest.approx([12 * e6]),
    }


class Private(nn.Module):
    """Shows nobody its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(3))
        self.eval()  # PyTorch itself does not survive a part that holds the whole.
        self.parts = nn.ModuleList([nn.BatchNorm1d(3), nn.Identity()])
        self.parts.append(self.parts)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the input, normalized and shifted."""
        return self.parts[0](x) + self.shift


def constants() -> tuple[dict[str, list[bool]], amanda.Tool]:
    """Return a tool, and for each type of op which of the inputs it finds to be constants."""
    found: dict[str, list[bool]] = {}

    def analyse(context: amanda.OpContext) -> None:
        inputs = context.get_inputs() or ()
        known = [context.value(position) is not None for position in range(len(inputs))]
        found[context.op_type] = known[:5]

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    return found, tool


@pytest.mark.parametrize("method", ["buffers", "named_buffers", "modules", "named_modules"])
def test_buffers_are_constants_whatever_a_class_overrides(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(Private, method, lambda *args, **kwargs: 1 / 0)
    found, tool = constants()
    x, model = torch.rand(2, 3), Private()
    with amanda.apply(tool):
        model(x)
    assert found["batch_norm"] == [False, True, True, True, True]
    assert found["add"][:2] == [False, True]


def test_memory_that_is_known_is_added_up_like_other_memory() -> None:
    with amanda.apply(amanda.Tool()):  # Which finds torch's symbols.
        pass
    base, copied = torch.ones(6, 4), torch.ones(5)
    values = [
        *(base, base[2:], base.t(), torch.nn.Parameter(base), torch.ones(3, dtype=torch.bfloat16)),
        *(torch._lazy_clone(copied), torch.ones(2, dtype=torch.complex64).conj(), 1.0, None),
        *([torch.ones(2), (torch.ones(3),)], torch.empty(0), torch.ones(4, device="meta")),
    ]
    total, new, problem = FACTS.storages(values, {})
    assert (total, len(new), problem) == (4 * 96 + 6 + 20 + 16 + 8 + 12, 9, "")
    known = {id(storage.holder): storage[:2] for storage in new}
    assert FACTS.storages(values, known) == (total, [], "")
    assert torch._C._is_cow_tensor(values[5])  # type: ignore[attr-defined]
    base.untyped_storage().resize_(200)
    more, moved, _ = FACTS.storages(values, known)
    assert more == total + 4 * (200 - 96)
    assert {storage.nbytes for storage in moved} == {200}
    _, found, problem = FACTS.storages([torch.ones(2).to_sparse(), base], {})
    assert [storage.nbytes for storage in found] == [200]
    assert "no storage" in problem


def test_a_routine_is_not_called_for_memory_that_is_known() -> None:
    with amanda.apply(amanda.Tool()):  # Which finds torch's symbols.
        pass
    one, other = torch.ones(6, 4), torch.ones(5)
    _, new, _ = FACTS.storages([one, other], {})
    known = {id(storage.holder): storage[:2] for storage in new}
    sizes = {96, 116}
    calls: list[tuple[Any, ...]] = []
    routine = FACTS.unless_known(lambda *values, op: calls.append(values), known, sizes)
    seldom = is_read_in_cpp()
    for values, is_called in (
        ((one,), not seldom),
        ((one.t(), [None, other]), not seldom),
        ((other,), True),
        ((one, other, one), True),
        ((torch.ones(24),), True),
        ((one.to_sparse(), one), True),
    ):
        calls.clear()
        routine(*values, op=1)
        assert calls == [values] * is_called, values
    sizes.add(20)
    calls.clear()
    routine(other, op=1)
    other.untyped_storage().resize_(200)
    routine(other, op=1)
    assert len(calls) == (1 if seldom else 2)


def is_read_in_cpp() -> bool:
    return native is not None and bool(native.knows_storages())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_zeros_are_counted_as_numpy_counts_them(dtype: torch.dtype) -> None:
    with amanda.apply(amanda.Tool()):  # Which finds torch's symbols.
        pass
    x = torch.randn(300, 257).relu().to(dtype)
    x[0, :3] = torch.tensor([-0.0, 0.09375, 1e-3]).to(dtype)
    if dtype.is_floating_point:
        x[1, :3] = torch.tensor([float("nan"), float("-inf"), -0.09375])
    # One that is as large as the limit is not small.
    for value in (x, x[::7].t(), x[:0], nn.Parameter(x, requires_grad=False)):
        array = value.detach().numpy()
        expected = int((array == 0).sum()), int((abs(array) < 0.09375).sum())
        counted = dtype in (torch.float32, torch.float64) and is_read_in_cpp()
        assert FACTS.zeros(value, 0.09375) == (expected if counted else None)
    assert FACTS.zeros(x.to_sparse(), 0.1) is None
    freed = torch.ones(3, dtype=dtype)
    freed.untyped_storage().resize_(0)
    assert FACTS.zeros(freed, 0.1) is None


class Table(nn.Module):
    """A module that is never called, as one with tables of angles."""

    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.ones(3))


class Reader(nn.Module):
    """Reads a buffer of its own, which it replaces, and one of a module that does not run."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = Table(), nn.Sequential(*(nn.Identity() for _ in range(3)))
        self.register_buffer("state", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number of each row."""
        x = torch.mul(x, self.state)
        self.state = x[0].clone()
        return torch.sub(x, self.table.rows).div(self.state)


@torch.no_grad()
def test_buffers_of_all_models_are_constants_and_those_that_are_replaced() -> None:
    found, tool = constants()
    first, second = Private(), Reader()
    with amanda.apply(tool):
        x = first(torch.rand(2, 3))
        second(x)
        torch.maximum(x, second.table.rows)  # Outside of modules.
    assert [found[op][:2] for op in ("mul", "sub", "div", "maximum")] == [[False, True]] * 4


#: More operators than `Reader` has modules.
UNARY = [torch.abs, torch.ceil, torch.cos, torch.exp, torch.log, torch.neg, torch.sin]


@torch.no_grad()
def test_a_new_buffer_of_a_module_that_does_not_run_is_found_after_some_operators() -> None:
    found, tool = constants()
    model, x = Reader(), torch.rand(2, 3)
    with amanda.apply(tool):
        model(x)
        model.table.rows = torch.zeros(3)
        for function in UNARY:
            function(x)
        torch.maximum(x, model.table.rows)
    assert found["maximum"][:2] == [False, True]
