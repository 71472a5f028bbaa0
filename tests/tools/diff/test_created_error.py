"""Runs of different precision or mode: the operator that makes more than rounding explains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stays_compiled import STAYS_COMPILED
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import amanda
from amanda_tools.diff import compare
from amanda_tools.dump import Dump, Dumped

PRECISIONS = [torch.bfloat16, torch.float16]


class Block(nn.Module):
    """A block of a transformer, whose second layer can be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.scale, self.slope = 1.0, 1.0
        # Values like those of a trained model, so that no error is lost in zeros.
        for name, parameter in self.named_parameters():
            is_matrix = parameter.dim() > 1
            size = parameter[0].numel() ** -0.5 if is_matrix else 0.2
            offset = 1.0 if "norm.weight" in name or "last.weight" in name else 0.0
            parameter.data = offset + size * torch.randn_like(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, scale=self.scale * 8**-0.5)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden = F.silu(self.up(self.last(x)) * self.slope)
        result: torch.Tensor = x + self.down(hidden)
        return result


def dumped(dtype: torch.dtype, plant: Callable[[Block], object] | None = None) -> Dumped:
    torch.manual_seed(0)
    blocks = [Block(), Block(), Block()]
    x = torch.randn(2, 6, 32)
    if plant is not None:
        plant(blocks[1])
    model = nn.Sequential(*blocks).to(dtype)
    tool = Dump(values=["inputs", "weights", "outputs", "gradients"])
    with amanda.apply(tool):
        model(x.to(dtype)).float().square().mean().backward()
    return tool.result().open()


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    found = compare(dumped(torch.float32), dumped(dtype))
    assert (found.same, found.complete) == (True, True), found.conclusion()
    assert found.created
    assert found.created[0].ratio < 3
    assert found.precisions == [f"float32 and {str(dtype).removeprefix('torch.')}"]
    assert "No operator makes more error than its inputs and rounding explain" in found.conclusion()
    # Tensor by tensor everything differs, which says nothing.
    assert found.first is not None


PLANTS: dict[str, tuple[Callable[[Block], object], str, str]] = {
    "epsilon": (lambda block: setattr(block.last, "eps", 1.0), "1.last/layer_norm", "output 0"),
    "scale": (lambda block: setattr(block, "scale", 3.0), "scaled_dot", "output 0"),
    "factor": (lambda block: setattr(block, "slope", 1.3), "1/mul", "output 0"),
    "weight": (lambda block: block.up.weight.data.mul_(1.3), "1.up/linear", "up.weight"),
    "bias": (lambda block: block.out.bias.data.add_(0.5), "1.out/linear", "out.bias"),
}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", PLANTS)
def test_the_operator_that_makes_an_error_is_named(name: str, dtype: torch.dtype) -> None:
    plant, where, what = PLANTS[name]
    found = compare(dumped(torch.float32), dumped(dtype, plant))
    assert not found.same
    worst = found.created[0]
    assert where in worst.op.name, found.conclusion()
    assert what in worst.what
    assert worst.op.module.startswith("1")
    assert worst.outside == (name in ("weight", "bias"))
    assert sum(one.is_beyond for one in found.created) == 1, found.table().rows


def test_a_wrong_gradient_is_named() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * (2 if gradients[0].dtype == torch.bfloat16 else 1)

    def network(dtype: torch.dtype) -> Dumped:
        torch.manual_seed(0)
        first, last = nn.Linear(16, 16), nn.Linear(16, 16)
        x = torch.randn(4, 16)
        tool = Dump(values=["inputs", "weights", "outputs", "gradients"])
        with amanda.apply(tool):
            hidden = Doubled.apply(first.to(dtype)(x.to(dtype)))  # type: ignore[no-untyped-call]
            last.to(dtype)(hidden).square().sum().backward()
        return tool.result().open()

    found = compare(network(torch.float32), network(torch.bfloat16))
    assert not found.same
    assert (found.created[0].op.type, found.created[0].phase) == ("Doubled", "backward")


def both(
    program: Callable[[torch.dtype], object], other: torch.dtype = torch.bfloat16
) -> tuple[Dumped, Dumped]:
    dumps = []
    for dtype in (torch.float32, other):
        torch.manual_seed(0)
        tool = Dump(values=["inputs", "weights", "outputs", "gradients"])
        with amanda.apply(tool), torch.no_grad():
            program(dtype)
        dumps.append(tool.result().open())
    return dumps[0], dumps[1]


def test_whole_numbers_that_differ_come_from_outside() -> None:
    def program(dtype: torch.dtype) -> None:
        table = torch.linspace(-1, 1, 32, dtype=dtype).reshape(8, 4)
        F.silu(F.embedding(torch.tensor([1, 3 if dtype == torch.float32 else 5]), table))

    found = compare(*both(program))
    assert not found.same
    # `torch.embedding` takes the indices last.
    assert (found.created[0].op.word, found.created[0].what) == ("embedding", "input 1")
    assert found.created[0].outside


def test_what_follows_from_a_choice_that_flips_is_not_judged() -> None:
    # The first two are equal in bfloat16, so that another one is chosen.
    values = torch.tensor([[1.0, 1.0009, -1.0]])

    def program(dtype: torch.dtype) -> None:
        x = values.to(dtype) * 1
        chosen = torch.argmax(x, -1)
        F.silu(torch.tensor([[0.5, 2.0], [-1.0, 3.0], [0.0, 0.0]], dtype=dtype)[chosen])

    found = compare(*both(program))
    assert (found.same, found.complete) == (True, False), found.conclusion()
    assert found.jump is not None
    assert found.jump.a.word == "argmax"
    assert "What follows from this was not judged: output 0" in found.conclusion()


@pytest.mark.parametrize("least", ["infinite", "finite"])
def test_a_mask_is_no_error(least: str) -> None:
    def program(dtype: torch.dtype) -> None:
        value = float("-inf") if least == "infinite" else torch.finfo(dtype).min
        mask = torch.full((4, 4), value, dtype=dtype).triu(1)
        torch.softmax(torch.randn(4, 4).to(dtype) + mask, -1)

    found = compare(*both(program))
    assert (found.same, found.complete) == (True, True), found.conclusion()


def _largest(program: Callable[[torch.dtype], object], dtype: torch.dtype) -> float:
    """Return the largest ratio of an operator, in float32 and another dtype."""
    found = compare(*both(program, dtype))
    assert found.same, found.conclusion()
    return max(one.ratio for one in found.created)


def test_rounding_below_the_smallest_normal_number_is_no_error() -> None:
    # 2 ** -22 is four times the smallest number of float16, so that a quarter of it is lost.
    values = torch.linspace(1, 2, 64) * 2**-11
    assert _largest(lambda dtype: values.to(dtype) * values.to(dtype), torch.float16) < 3


@pytest.mark.parametrize("function", [torch.sin, torch.cos, torch.exp], ids=lambda f: f.__name__)
def test_an_absolute_error_of_an_input_may_be_a_relative_one(function: Any) -> None:
    # Their error in bfloat16 is up to 0.125, whatever the function's value.
    x = torch.linspace(20, 60, 64)
    assert _largest(lambda dtype: function(x.to(dtype) * 1), torch.bfloat16) < 3


def test_gradients_that_cancel_are_no_error() -> None:
    def program(dtype: torch.dtype) -> None:
        layer = nn.Linear(16, 16).to(dtype)
        x = torch.randn(8, 16).to(dtype)
        with torch.enable_grad():
            # The gradient of what is normalized is without its mean, which is nearly all of it.
            hidden = F.layer_norm(layer(x), (16,))
            torch.autograd.backward((hidden + 1e-2 * torch.randn(8, 16).to(dtype)).sum())

    assert _largest(program, torch.bfloat16) < 3


def test_a_nan_in_one_run_is_an_error() -> None:
    def program(dtype: torch.dtype) -> None:
        x = torch.full((3,), 300.0).to(dtype) * 1
        torch.sqrt(x if dtype == torch.float32 else x - x - 1)

    found = compare(*both(program))
    assert not found.same


def test_without_inputs_the_conclusion_says_what_to_record() -> None:
    def outputs(dtype: torch.dtype) -> Dumped:
        tool = Dump()
        with amanda.apply(tool):
            F.silu(torch.linspace(-1, 1, 9, dtype=dtype))
        return tool.result().open()

    found = compare(outputs(torch.float32), outputs(torch.bfloat16))
    assert "values=[inputs,weights,outputs]" in found.conclusion()
    assert not found.created


def test_tolerances_of_the_caller_decide() -> None:
    found = compare(dumped(torch.float32), dumped(torch.bfloat16), rtol=1e-6, atol=1e-6)
    assert not found.same
    assert not found.created


def _wrong_program(gm: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
    """Compile a graph in which the second `silu` is a little wrong."""
    found = [node for node in gm.graph.nodes if node.target == torch.ops.aten.silu.default]
    with gm.graph.inserting_after(found[1]):
        wrong = gm.graph.call_function(torch.ops.aten.mul.Tensor, (found[1], 1.01))
    found[1].replace_all_uses_with(wrong, lambda user: user is not wrong)
    gm.recompile()
    return gm


@pytest.mark.one_interceptor
@STAYS_COMPILED
@pytest.mark.parametrize(
    "backend", ["aot_eager", aot_autograd(fw_compiler=_wrong_program)], ids=["right", "wrong"]
)
def test_a_compiler_that_makes_an_error(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")

    def outputs(is_compiled: bool) -> Dumped:
        torch.manual_seed(0)
        model, x = nn.Sequential(Block(), Block(), Block()), torch.randn(2, 6, 32)
        call = torch.compile(model, backend=backend) if is_compiled else model
        tool = Dump(values=["inputs", "weights", "outputs"])
        with amanda.apply(tool), torch.no_grad():
            call(x)
        return tool.result().open()

    eager, compiled = outputs(False), outputs(True)
    assert compiled.index.ops[-1].namespace.endswith("compiled")
    found = compare(eager, compiled)
    assert (found.complete, found.unmatched_a) == (True, [])
    # Compiled code takes `unbind` apart.
    apart = {n for n, op in enumerate(eager.index.ops) if op.word == "split"}
    assert len(found.compared) == sum(one.op not in apart for one in eager.index.tensors)
    assert found.same == (backend == "aot_eager"), found.conclusion()
    if not found.same:
        assert (found.created[0].op.name, found.created[0].op.word) == ("1/silu", "silu")
