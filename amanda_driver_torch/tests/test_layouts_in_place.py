"""In-place operators on tensors of every layout and kind, under tools that change nothing.

Most of these have no memory that one could point to. What runs in plain torch runs the same, and
what raises there raises.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import after

from .interceptors import under_both_interceptors
from .tensors import equal
from .unchanged_by_tools import CHANGING_NOTHING, same_under, unlike_plain

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOOLS = pytest.mark.parametrize("tool", sorted(set(CHANGING_NOTHING) - {"empty"}))


@pytest.fixture(autouse=True)
def _interceptor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "interceptor" in request.fixturenames:
        monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", request.getfixturevalue("interceptor"))


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    if not dist.is_available():
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Wrapped(torch.Tensor):
    """A tensor around another, without memory of its own."""

    content: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
        made.content = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = tree_map_only(Wrapped, lambda w: w.content, (args, kwargs or {}))
        result = func(*given[0], **given[1])
        if func._schema.name.endswith("_"):
            return args[0]
        return tree_map_only(torch.Tensor, Wrapped, result)


class Named(torch.Tensor):
    """A subclass that adds nothing."""


def _dense() -> torch.Tensor:
    return torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.5], [0.25, 0.0, 0.0]])


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "strided": _dense,
    "view": lambda: torch.cat([_dense(), _dense()])[:3],
    "transposed": lambda: _dense().t(),
    "coo": lambda: _dense().to_sparse(),
    "hybrid coo": lambda: _dense().to_sparse(1),
    "csr": lambda: _dense().to_sparse_csr(),
    "csc": lambda: _dense().to_sparse_csc(),
    "bsr": lambda: _dense().to_sparse_bsr((1, 1)),
    "mkldnn": lambda: _dense().to_mkldnn(),
    "jagged": lambda: torch.nested.nested_tensor([_dense()[:2], _dense()], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([_dense()[:2], _dense()]),
    "wrapper": lambda: Wrapped(_dense()),
    "subclass": lambda: _dense().as_subclass(Named),
    "parameter": lambda: nn.Parameter(_dense()),
    "meta": lambda: torch.empty(3, 3, device="meta"),
    # The group of these tests does not move data, so `distribute_tensor` would leave memory unset.
    "distributed": lambda: DTensor.from_local(_dense(), init_device_mesh("cpu", (1,)), [Shard(0)]),
}

#: Arguments of an in-place operator, one of which most of them take.
ARGUMENTS: list[Callable[[torch.Tensor], tuple[Any, ...]]] = [
    lambda x: (),
    lambda x: (2.0,),
    lambda x: (1,),
    lambda x: (x.detach().clone(),),
    lambda x: (0, 1),
    lambda x: (2.0, 0, 1.5),
    lambda x: (torch.eye(3) > 0, 1.5),
    lambda x: (torch.eye(3) > 0, torch.ones(3, 3)),
    lambda x: (0, torch.tensor([0, 1, 2]), torch.ones(3, 3)),
    lambda x: (0, torch.tensor([0, 1, 2]), 1.5),
    lambda x: (0, torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3)),
    lambda x: (torch.tensor([0, 1]), torch.ones(2)),
    lambda x: ((torch.tensor([0, 1]),), torch.ones(2, 3)),
    lambda x: (torch.ones(3, 3), torch.ones(3, 3)),
    lambda x: (torch.ones(3), torch.ones(3)),
    lambda x: (torch.ones(2, 3, 3), torch.ones(2, 3, 3)),
    lambda x: (0, torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3), "sum"),
    lambda x: (torch.ones(3, 3), 0.5),
    lambda x: ((3, 3), (3, 1)),
    lambda x: (lambda value: value + 1,),
]

#: Operators that are about something else than values: processes, autograd's own marks.
_LEFT_OUT = {"share_memory_", "requires_grad_", "set_", "pin_memory_", "rename_"}


@functools.cache
def operators() -> list[tuple[str, int]]:
    """Return in-place methods, and the number of arguments that each takes on a dense tensor."""
    found = []
    for name in sorted(dir(torch.Tensor)):
        if not name.endswith("_") or name.startswith("_") or name in _LEFT_OUT:
            continue
        for number, arguments in enumerate(ARGUMENTS):
            x = _dense()
            try:
                getattr(x, name)(*arguments(x))
            except Exception:
                continue
            found.append((name, number))
            break
    return found


def program(name: str, number: int, layout: str, gradients: bool) -> Callable[[], Any]:
    def run() -> Any:
        leaf = x = LAYOUTS[layout]()
        if gradients:
            leaf = leaf.detach().requires_grad_()
            x = leaf * 1
        getattr(x, name)(*ARGUMENTS[number](x))
        if gradients and x.requires_grad:
            (x * x).sum().backward()
        return [_values(x), _values(leaf.grad)]

    return run


def _values(x: Any) -> Any:
    if isinstance(x, Wrapped):
        return x.content
    if isinstance(x, torch.Tensor) and x.device.type == "meta":
        return [list(x.shape), str(x.dtype)]
    return x.to_local() if hasattr(x, "to_local") else x


# Plain PyTorch ends with a segmentation fault where these meet an operator that they have not, and
# where a Python function is to write memory that a wrapper does not have.
_OPAQUE = {"mkldnn": {"add_", "mul_", "relu_", "sigmoid_", "tanh_", "zero_", "transpose_"}}

_WRAPPERS = {"wrapper", "distributed"}
_BY_PYTHON = {"apply_", "map_", "map2_"}

CASES = [
    (operator, layout, gradients)
    for operator in operators()
    for layout in LAYOUTS
    for gradients in (False, True)
    if operator[0] in _OPAQUE.get(layout, {operator[0]})
    and not (operator[0] in _BY_PYTHON and layout in _WRAPPERS)
]


def behave_as_plain(tool: str, cases: list[Any]) -> None:
    programs = {str(case): program(*case[0], *case[1:]) for case in cases}
    # Where both raise, it may be at another step.
    assert unlike_plain(tool, programs, or_both_raise=True) == []


@under_both_interceptors
@TOOLS
def test_in_place_operators_behave_as_in_plain_torch(tool: str, interceptor: str) -> None:
    behave_as_plain(tool, random.Random(tool + interceptor).sample(CASES, 20))


@pytest.mark.exhaustive
@under_both_interceptors
@TOOLS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_in_place_operators_behave_as_in_plain_torch(
    layout: str, tool: str, interceptor: str
) -> None:
    behave_as_plain(tool, [case for case in CASES if case[1] == layout])


def test_the_arguments_serve_most_operators() -> None:
    assert len(operators()) > 130


# Programs.


def sparse_adam() -> Any:
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    for _ in range(3):
        embedding(torch.tensor([1, 2, 3])).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return embedding.weight


def distributed_weights() -> Any:
    weight: Any = nn.Parameter(LAYOUTS["distributed"]())
    for _ in range(3):
        (weight * 2).sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad)
            weight.add_(1).mul_(2)
        weight.grad = None
    return weight.to_local()


def wrapped() -> Any:
    weight: Any = Wrapped(_dense())
    for _ in range(3):
        weight.add_(1)
        weight *= 2
    return weight.content


@under_both_interceptors
@TOOLS
@pytest.mark.parametrize("run", [sparse_adam, distributed_weights, wrapped])
def test_programs_run(run: Callable[[], Any], tool: str, interceptor: str) -> None:
    same_under(tool, run)


# Edits.


def doubled(value: Any) -> Any:
    return value * 2


@under_both_interceptors
@pytest.mark.parametrize("layout", ["coo", "csr", "mkldnn", "wrapper"])
def test_results_are_edited_where_no_gradient_is_recorded(layout: str, interceptor: str) -> None:
    x = LAYOUTS[layout]()
    with amanda.apply(after("neg_" if layout != "mkldnn" else "mul_", doubled)):
        x.neg_() if layout != "mkldnn" else x.mul_(-1.0)
    equal(_values(x).to_dense(), _dense() * -2)


@under_both_interceptors
def test_an_edit_that_the_backward_might_see_is_refused(interceptor: str) -> None:
    leaf = LAYOUTS["coo"]().requires_grad_()
    with (
        amanda.apply(after("neg_", doubled)),
        pytest.raises(UnsupportedError, match="whether it did is not known"),
    ):
        (leaf * 1).neg_()


def nested_products() -> Any:
    a, b = torch.ones(2, 3), torch.full((3, 3), 2.0)
    left = torch.nested.nested_tensor([a, b]).requires_grad_()
    right = torch.nested.nested_tensor([a.t(), b]).requires_grad_()
    product = torch.bmm(left, right)
    torch.nested.to_padded_tensor(torch.relu(product * product), 0.0).sum().backward()
    assert left.grad is not None
    assert right.grad is not None
    return [*left.grad.unbind(), *right.grad.unbind()]


@under_both_interceptors
@TOOLS
def test_gradients_of_nested_tensors_are_seen(tool: str, interceptor: str) -> None:
    same_under(tool, nested_products)


@under_both_interceptors
@pytest.mark.parametrize(
    "ask", ["insert_after_backward_op", "insert_before_op", "replace_backward_op"]
)
def test_edits_of_nested_tensors_with_gradients_are_refused(ask: str, interceptor: str) -> None:
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "relu":
            getattr(context, ask)(lambda value: value * 0.5)

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool), pytest.raises(amanda.AmandaError, match=r"layout=torch\.jagged"):
        nested_products()
