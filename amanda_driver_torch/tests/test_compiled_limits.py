"""Torch's limits of recompilations, while code for tools is bound to more than code without."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

import amanda
from amanda_core.testing.kit.tools import watching

from .interceptors import STAYS_COMPILED
from .tensors import equal

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.usefixtures("fresh_compiler"),
    STAYS_COMPILED,
]

X = torch.linspace(-1, 1, 40).reshape(5, 8)
DYNAMO: Any = torch._dynamo.config
NOTICE = pytest.mark.filterwarnings("ignore:The compiled callable")
#: More objects than Dynamo compiles for below.
MANY = 5


@pytest.fixture(autouse=True)
def _low_limit() -> Iterator[None]:
    # Dynamo itself warns of gradients of values that are no leaves.
    with DYNAMO.patch(recompile_limit=2, automatic_dynamic_shapes=False), torch.no_grad():
        yield


def graphs() -> int:
    """Return how many graphs were compiled so far."""
    return int(counters["stats"]["unique_graphs"])


@NOTICE
@pytest.mark.parametrize("tools_first", [False, True])
def test_code_for_tools_has_a_limit_of_its_own(tools_first: bool) -> None:
    called, (seen, watch) = torch.compile(lambda x: F.relu(x) + 1, backend="eager"), watching()
    inputs = [X[:n] for n in (1, 2, 3)]
    expected, start = [F.relu(x) + 1 for x in inputs], graphs()
    dynamo: Any = torch._dynamo.config
    with dynamo.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        if not tools_first:
            equal([called(x) for x in inputs[:2]], expected[:2])
            assert graphs() == start + 2
        for _ in range(2):
            with amanda.apply(watch):
                # Beyond the limit it runs eagerly, and is seen all the same.
                got = [called(x) for x in inputs]
            equal(got, expected)
            equal([called(x) for x in inputs[:2]], expected[:2])
            assert graphs() == start + 4
    assert Counter(seen) == {"relu": 6, "add": 6}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return F.gelu(self.linear(x)) + x


class Broken(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        x = x * 2
        torch._dynamo.graph_break()
        return super().forward(x)


class Sharing(nn.Module):
    """A layer that calls a compiled function, as models do for their positions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def layers(compiled: Callable[..., Any], layer: Callable[[], nn.Module] = Layer) -> Any:
    return nn.Sequential(*(compiled(layer()) for _ in range(MANY)))


def regional(compiled: Callable[..., Any]) -> Any:
    return layers(compiled)


def after_a_break(compiled: Callable[..., Any]) -> Any:
    return layers(lambda layer: torch.compile(layer, backend="eager"), Broken)


def one_function_in_many_modules(compiled: Callable[..., Any]) -> Any:
    function = compiled(lambda x: F.gelu(x) + x)
    return nn.Sequential(*(Sharing(function) for _ in range(MANY)))


def weights_as_arguments(compiled: Callable[..., Any]) -> Any:
    weights = [nn.Linear(8, 8).weight for _ in range(MANY)]
    function = compiled(lambda x, w: F.gelu(F.linear(x, w)) + x)

    def called(x: torch.Tensor) -> Any:
        for weight in weights:
            x = function(x, weight)
        return x

    return called


def weights_in_a_list(compiled: Callable[..., Any]) -> Any:
    weights = [[nn.Linear(8, 8).weight] for _ in range(MANY)]
    function = compiled(lambda x, held: F.gelu(F.linear(x, held[0])) + x)

    def called(x: torch.Tensor) -> Any:
        for held in weights:
            x = function(x, held)
        return x

    return called


def closures(compiled: Callable[..., Any]) -> Any:
    def closure(linear: nn.Linear) -> Any:
        return compiled(lambda x: F.gelu(linear(x)) + x)

    functions = [closure(nn.Linear(8, 8)) for _ in range(MANY)]

    def called(x: torch.Tensor) -> Any:
        for function in functions:
            x = function(x)
        return x

    return called


@pytest.mark.parametrize(
    "make",
    [
        regional,
        after_a_break,
        one_function_in_many_modules,
        weights_as_arguments,
        weights_in_a_list,
        closures,
    ],
)
def test_code_for_other_objects_does_not_count(make: Callable[..., Any]) -> None:
    def compiled(function: Any) -> Any:
        return torch.compile(function, backend="eager", fullgraph=True)

    plain, (seen, watch) = make(compiled), watching()
    expected = plain(X)
    torch._dynamo.reset()
    with amanda.apply(watch) as handle:
        got = [plain(X) for _ in range(2)]
        start = graphs()
        got.append(plain(X))
        assert graphs() == start, "compiled again"
        gaps = [gap for gap in handle.coverage()["pytorch"] if "compiled callable" in gap.what]
    equal(got, [expected] * 3)
    assert Counter(seen)["gelu"] == 3 * MANY
    assert not gaps


def test_code_for_one_object_counts() -> None:
    """A program that exceeds the limit by itself does so under tools, too."""
    net = regional(lambda layer: torch.compile(layer, backend="eager", fullgraph=True))
    for under in (nullcontext(), amanda.apply(watching()[1])):
        torch._dynamo.reset()
        with under:
            for x in (X[:1], X[:2]):
                net(x)
            with pytest.raises(FailOnRecompileLimitHit):
                net(X)


@amanda.staged
def _unchanged(*values: Any) -> Any:
    return values if len(values) > 1 else values[0]


@NOTICE
@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_limit_for_all_code(fullgraph: bool) -> None:
    """Dynamo compiles no more then. Without tools it has compiled once, and a program goes on."""
    net = regional(lambda layer: torch.compile(layer, backend="eager", fullgraph=fullgraph))
    seen, watch = watching()
    staged = amanda.Tool()  # Layers with staged routines do not share code.
    staged.add_inst_for_op(lambda context: context.insert_after_op(_unchanged))
    expected = net(X)
    with DYNAMO.patch(accumulated_recompile_limit=3), amanda.apply(watch, staged) as handle:
        got = [net(X) for _ in range(2)]
        gaps = [gap.why for gap in handle.coverage()["pytorch"] if "compiled callable" in gap.what]
    equal(got, [expected] * 2)
    assert Counter(seen)["gelu"] == 2 * MANY
    assert all("accumulated_recompile_limit" in why for why in gaps)
    assert gaps
