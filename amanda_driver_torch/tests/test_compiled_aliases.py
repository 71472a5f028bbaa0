"""Memory of values in compiled programs that routines on the host get and return."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import amanda

from .interceptors import STAYS_COMPILED
from .tensors import equal

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.usefixtures("fresh_compiler"),
    STAYS_COMPILED,
]

X = torch.linspace(-1, 1, 16).reshape(4, 4)
Program = Callable[[torch.Tensor], Any]


def written_view(x: torch.Tensor) -> Any:
    y = x.view(-1)
    y.add_(1)
    return x * 1


def written_base(x: torch.Tensor) -> Any:
    z = x * 1
    y = z.t()
    z.add_(1)
    return y * 2


def written_part(x: torch.Tensor) -> Any:
    z = x * 1
    z[0].add_(1)
    z.view(-1)[1:3] = 7
    return z


def written_through_an_argument(x: torch.Tensor) -> Any:
    y = x.view(-1)
    y.add_(1)
    return y * 2


def written_copy_that_is_none(x: torch.Tensor) -> Any:
    z = x * 1
    y = z.contiguous()
    y.mul_(3)
    return z + 1


def written_outside(x: torch.Tensor) -> Any:
    return x.view(-1)


def returned_twice(x: torch.Tensor) -> Any:
    y = x * 1
    return y, y.view(-1)


def view_before(x: torch.Tensor) -> Any:
    mask = x * 1
    mask[:, :2] = mask[:, :2].masked_fill(mask[:, :2] > 0.5, 0.0)
    return mask * 2


def view_without_base(x: torch.Tensor) -> Any:
    return F.relu((x * 1).flatten(), inplace=True) + 1


def view_afterwards(x: torch.Tensor) -> Any:
    y = F.linear(x, x)
    y += x
    return y.view(-1)


def view_that_nothing_uses(x: torch.Tensor) -> Any:
    x.view(-1)
    x.add_(1)
    return x * 2


EAGER: list[Program] = [
    *(written_view, written_base, written_part, written_through_an_argument),
    *(written_copy_that_is_none, written_outside, returned_twice),
]
COMPILED: list[Program] = [
    *(view_before, view_without_base, view_afterwards, view_that_nothing_uses),
]


def run(program: Program) -> list[Any]:
    """Return the results, written once more by the caller, and the argument."""
    x = X.clone()
    found = program(x)
    results = list(found) if isinstance(found, tuple) else [found]
    results[-1].mul_(2)
    return [*results, x]


def nothing(*values: Any) -> None:
    pass


def touching(observe: bool) -> amanda.Tool:
    """Return a tool with routines that change nothing around each operator."""

    def analysis(context: amanda.OpContext) -> None:
        context.insert_before_op(nothing, observe=observe)
        context.insert_after_op(nothing, observe=observe)

    tool = amanda.Tool()
    tool.add_inst_for_op(analysis)
    return tool


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", [*EAGER, *COMPILED], ids=lambda program: program.__name__)
def test_memory_is_shared_as_without_tools(program: Program, backend: str) -> None:
    expected = run(program)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with amanda.apply(touching(observe=False)):
            got = run(torch.compile(program, backend=backend))
    equal(got, expected)
    eager = [str(one.message) for one in caught if "runs eagerly" in str(one.message)]
    assert len(eager) == (program in EAGER), eager
    assert all("shares memory" in message for message in eager)


@pytest.mark.parametrize("program", EAGER, ids=lambda program: program.__name__)
def test_observers_leave_it_compiled(program: Program) -> None:
    expected = run(program)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amanda.apply(touching(observe=True)):
            got = run(torch.compile(program, backend="aot_eager"))
    equal(got, expected)


OWN = torch.linspace(0, 1, 4096).reshape(64, 64)
ARRAY = torch.linspace(1, 2, 4096).reshape(64, 64).numpy()
KEPT: list[torch.Tensor] = []

#: Operator -> a routine after it.
ROUTINES: dict[str, Callable[[torch.Tensor], Any]] = {
    "relu": lambda value: OWN,
    "sigmoid": lambda value: value.detach(),
    "cos": lambda value: (value + 1).t(),
    "sin": lambda value: torch.from_numpy(ARRAY),
    "tanh": lambda value: torch.cat([value.view(-1), value.view(-1)])[1 : value.numel() + 1],
    "exp": lambda value: KEPT.append(value),
    "abs": lambda value: KEPT.append((value * 2)[0]),
}


def chained(x: torch.Tensor) -> Any:
    x = torch.relu(x @ x) * 2
    x = torch.sigmoid(x @ x) * 2
    x = torch.cos(x @ x) * 2
    x = torch.sin(x @ x) * 2
    x = torch.tanh(x.view(-1)).view(64, 64) * 2
    x = torch.exp(x) * 2
    return torch.abs(x).sin() @ x


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"inplace_buffers": True}], ids=["default", "in-place"])
def test_memory_of_results_and_of_kept_values(options: dict[str, Any]) -> None:
    """Inductor writes other values where it does not need one any more."""

    def analysis(context: amanda.OpContext) -> None:
        if context.op_type in ROUTINES:
            context.insert_after_op(ROUTINES[context.op_type])

    given, before, found = torch.linspace(-1, 1, 4096).reshape(64, 64), (OWN * 1, ARRAY * 1), []
    for program in (chained, torch.compile(chained, backend="inductor", options=options)):
        KEPT.clear()
        tool = amanda.Tool()
        tool.add_inst_for_op(analysis)
        with amanda.apply(tool):
            result = [program(given) for _ in range(2)]
        found.append([*result, *KEPT])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    equal([OWN, torch.from_numpy(ARRAY)], [before[0], torch.from_numpy(before[1])])


def scaled_part(x: torch.Tensor) -> Any:
    y = x * 1
    y[2].mul_(2)
    return y * x


def scaled_base(x: torch.Tensor) -> Any:
    y = x * 1
    view = y.t()
    y.mul_(2)
    return view * x


def copied_into_a_view(x: torch.Tensor) -> Any:
    y = x * 1
    y.t().copy_(x)
    return y * x


def returned_with_its_view(x: torch.Tensor) -> Any:
    y = x * 2
    return y, y.t()


def returned_with_a_part_of_its_view(x: torch.Tensor) -> Any:
    y = x * 2
    return y, y.expand(2, 4, 4)[1]


def part_of_the_argument(x: torch.Tensor) -> Any:
    return x[0]


def assigned(x: torch.Tensor) -> Any:
    y = x * 1
    y[0] = x[1]
    return y.t() * x


def written_once_detached(x: torch.Tensor) -> Any:
    y = x * 1
    y.detach().mul_(2)
    return y + x


def written_itself(x: torch.Tensor) -> Any:
    y = (x * 1).t()
    y.mul_(2)
    return y


EAGER_GRADIENTS: list[Program] = [
    *(scaled_part, scaled_base, copied_into_a_view),
    *(returned_with_its_view, returned_with_a_part_of_its_view, part_of_the_argument),
]
COMPILED_GRADIENTS: list[Program] = [assigned, written_once_detached, written_itself]


@amanda.staged
def nothing_staged(*values: Any) -> None:
    pass


def derive(program: Program) -> list[Any]:
    """Return the gradient of the argument, of whose view the caller writes once more."""
    leaf = X.clone().requires_grad_()
    x = leaf * 1
    found = program(x)
    results = list(found) if isinstance(found, tuple) else [found]
    results[-1].mul_(2)
    torch.stack([result.square().sum() for result in [*results, x]]).sum().backward()
    return [leaf.grad, *results]


@pytest.mark.parametrize("staged", [False, True], ids=["observed", "staged"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "program", [*EAGER_GRADIENTS, *COMPILED_GRADIENTS], ids=lambda program: program.__name__
)
def test_views_are_differentiated_as_without_tools(
    program: Program, backend: str, staged: bool
) -> None:
    """Autograd does not know a view any more where a routine gets its gradient."""
    routine = nothing_staged if staged else nothing

    def analysis(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(routine, observe=not staged)
        context.insert_after_backward_op(routine, observe=not staged)

    tool = amanda.Tool()
    tool.add_inst_for_op(analysis)
    expected = derive(program)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with amanda.apply(tool):
            got = derive(torch.compile(program, backend=backend))
    torch.testing.assert_close(got, expected)
    eager = [str(one.message) for one in caught if "runs eagerly" in str(one.message)]
    assert len(eager) == (program in EAGER_GRADIENTS), eager
    assert all("shares memory" in message for message in eager)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_result_whose_view_has_no_routine(backend: str) -> None:
    def analysis(context: amanda.OpContext) -> None:
        if context.op_type == "mul":
            context.insert_before_backward_op(nothing, observe=True)

    def derived(program: Program) -> Any:
        x = X.clone().requires_grad_()
        results = program(x)
        torch.stack([result.square().sum() for result in results]).sum().backward()
        return [x.grad, *results]

    tool = amanda.Tool()
    tool.add_inst_for_op(analysis)
    expected = derived(returned_with_a_part_of_its_view)
    with pytest.warns(amanda.AmandaWarning, match="shares memory"), amanda.apply(tool):
        got = derived(torch.compile(returned_with_a_part_of_its_view, backend=backend))
    torch.testing.assert_close(got, expected)


# Dynamo itself asks the argument for its gradient after the break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_views_at_a_graph_break_are_in_the_coverage() -> None:
    def program(x: torch.Tensor) -> Any:
        y = x.view(-1)
        torch._dynamo.graph_break()
        return y * 2

    def derived(program: Program) -> Any:
        leaf = X.clone().requires_grad_()
        found = program(leaf * 1)
        found.square().sum().backward()
        return [leaf.grad, found]

    def analysis(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(nothing, observe=True)

    tool = amanda.Tool()
    tool.add_inst_for_op(analysis)
    expected = derived(program)
    with amanda.apply(tool) as session:
        got = derived(torch.compile(program, backend="aot_eager"))
        gaps = session.coverage()["pytorch"]
    torch.testing.assert_close(got, expected)
    assert any("pass on at graph breaks" in gap.what for gap in gaps)


#: What two arguments are of one tensor.
SHARED: dict[str, Callable[[torch.Tensor], Any]] = {
    "whole": lambda base: (base, base.view(-1).view(4, 4)),
    "overlapping": lambda base: (base[:3], base[1:]),
    "the same": lambda base: (base, base),
    "apart": lambda base: (base, base * 2),
}


@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("shared", SHARED)
def test_arguments_that_share_memory(shared: str, backend: str, written: int) -> None:
    def program(*given: torch.Tensor) -> Any:
        given[written].add_(1)
        return given[0] * given[1]

    def result(program: Callable[..., Any]) -> list[Any]:
        base = X.clone()
        return [program(*SHARED[shared](base)), base]

    expected = result(program)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with amanda.apply(touching(observe=True)):
            got = result(torch.compile(program, backend=backend))
    equal(got, expected)
    eager = [str(one.message) for one in caught if "runs eagerly" in str(one.message)]
    assert len(eager) == (shared in ("whole", "overlapping")), eager
    assert all("arguments that share memory" in message for message in eager)
