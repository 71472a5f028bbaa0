"""Every tool on unusual programs: no tool fails or changes them."""

# mypy: allow-untyped-calls
# torch leaves much untyped.

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_tool import EDITING, TOOLS, checked
from torch import nn

import amanda
from amanda_tools.quantize import Quantize

Hidden = Callable[[torch.Tensor, nn.Module], Any]


def no_grad_view(x: torch.Tensor, first: nn.Module) -> Any:
    # PyTorch forbids to ask for the node of such a view.
    table = nn.Embedding(6, 8, padding_idx=0)
    return first(x) + table(torch.arange(4))


def rows_written(x: torch.Tensor, first: nn.Module) -> Any:
    # PyTorch rebuilds, or forbids to ask for, the nodes of such views.
    weight = nn.Parameter(torch.ones(8, 8))
    with torch.no_grad():
        weight[3] += 1
        weight[2:] *= 2
        rows = weight[1:]
        rows += 1
        rows = rows + torch.zeros(8)
    return first(x) @ weight + rows.sum()


def many_outputs(x: torch.Tensor, first: nn.Module) -> Any:
    layers = [nn.Linear(8, 1) for _ in range(40)]
    hidden = torch.cat([layer(first(x)) for layer in layers], 1)
    torch.nn.utils.clip_grad_norm_([layer.weight for layer in layers], 1.0)
    return torch.stack(hidden.unbind(1)[:8], 1)


def storage_freed(x: torch.Tensor, first: nn.Module) -> Any:
    # As FSDP frees what it gathered; PyTorch does not where NumPy may still look at it.
    gathered = nn.Parameter(torch.eye(8))
    result = first(x) @ gathered
    storage = gathered.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    gathered.detach().view(64)  # Has no values to look at.
    storage.resize_(size)
    gathered.data.copy_(torch.eye(8))
    return result


def nested(x: torch.Tensor, first: nn.Module) -> Any:
    parts = torch.nested.nested_tensor([first(x)[:1], first(x)[:3]])
    return torch.nested.to_padded_tensor(parts * 2, 0.0).sum(0)


def layouts(x: torch.Tensor, first: nn.Module) -> Any:
    result = first(x)
    values = result.detach()
    for made in (
        values.to_mkldnn(),
        values.to_sparse(),
        values.to_sparse_csr(),
        values.to_sparse_csc(),
        values.to_sparse_bsr((1, 1)),
        values.to(torch.complex64).conj(),
        torch._neg_view(values),
        values.t(),
    ):
        made.clone().mul_(1.0)
    return result


def types_change(x: torch.Tensor, first: nn.Module) -> Any:
    # One operator of the program, which gets complex numbers in its second execution.
    result = first(x)
    for dtype in (torch.float32, torch.complex64, torch.float64):
        result = (result.to(dtype) @ torch.eye(8, dtype=dtype)).real.float()
    return result


def step_of(first: nn.Module) -> int:
    """Return the number of the step: gradients exist after the first."""
    return int(next(first.parameters()).grad is not None)


def numbers_of_outputs(x: torch.Tensor, first: nn.Module) -> Any:
    hidden, sums = first(x), []
    for sizes in ((2, 1), (1, 2), (4, 1), (1, 4), (3, 4)):
        sums += [part.sum() for part in hidden.split(sizes[step_of(first)])]
    return hidden + torch.stack(sums).sum()


def other_overloads(x: torch.Tensor, first: nn.Module) -> Any:
    # An overload without an axis has fewer positions.
    hidden = total = first(x)
    for pair in (((0,), ()), ((), (1, True)), ((hidden,), (0,)), ((0,), (hidden,))):
        given = pair[step_of(first)]
        found = torch.max(hidden, *given)
        total = total + (found if isinstance(found, torch.Tensor) else found[0]).sum()
        total = total + hidden.sum(**({"dim": 0} if len(given) == 1 else {})).sum()
    return total


def axes_of_numbers(x: torch.Tensor, first: nn.Module) -> Any:
    # PyTorch takes a number for a vector where an operator needs an axis.
    hidden = first(x)
    number = hidden.mean()
    same = (number.permute(()), number.transpose(0, -1), number.sum(0), number.amax(0))
    more = (number.cumsum(0), number.softmax(0), number.flip(0), number.flatten()[0])
    last = (number.unsqueeze(0)[0], number.expand(2)[0], torch.cat([number[None]])[0])
    return hidden + sum((*same, *more, *last))


def copied_on_write(x: torch.Tensor, first: nn.Module) -> Any:
    lazy = torch._lazy_clone(x)
    result = first(lazy) + lazy[:, 1:2]
    is_still_shared: Any = torch._C._is_cow_tensor  # type: ignore[attr-defined]
    return result + float(is_still_shared(lazy))


def other_operands(x: torch.Tensor, first: nn.Module) -> Any:
    hidden = total = first(x)
    for pair in ((hidden, 2.0), (3, hidden[0]), (hidden[0], hidden), (hidden.sum(), hidden)):
        other = pair[step_of(first)]
        total = total + (other * hidden).sum() + (hidden + other).sum()
        total = total + torch.as_tensor(other + other).sum() + (total * other).sum()
    return total


def integers(x: torch.Tensor, first: nn.Module) -> Any:
    places = torch.arange(4)
    table = torch.outer(places, places) @ torch.eye(4, dtype=torch.int64)
    return first(x)[places.addmv(table, places) % 4]


class HalfBuilt(nn.Module):
    """Calls a module before it is a module itself, and overrides what it inherits."""

    def __init__(self, x: torch.Tensor, first: nn.Module) -> None:
        self.shown = first(x).detach()
        super().__init__()
        self.first = first

    def modules(self, remove_duplicate: bool = True) -> Any:
        raise NotImplementedError

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> Any:
        """Return the layer's result, and once more what it was."""
        return self.first(x) + self.shown


#: What a network does between its two layers, with four samples.
PROGRAMS: dict[str, Hidden] = {
    "a number drawn for all": lambda x, first: first(x) + torch.rand(()),
    "a row drawn for all": lambda x, first: first(x) + torch.randn(8),
    "a column drawn": lambda x, first: first(x) * torch.randn(4, 1),
    "the first sample for all": lambda x, first: first(x) + first(x)[:1],
    "a maximum of all": lambda x, first: first(x) / first(x).max(),
    "no samples": lambda x, first: first(x[:0]),
    "a product over no axis": lambda x, first: first(x) + torch.ones(4, 0) @ torch.ones(0, 8),
    "places of elements": lambda x, first: (
        first(x) + torch.ones(4, 8).nonzero(as_tuple=True)[1].reshape(4, 8)
    ),
    "no axis of samples": lambda x, first: first(x[0]),
    "a product of stacks": lambda x, first: torch.bmm(first(x)[None], torch.randn(1, 8, 8))[0],
    "sparse": lambda x, first: torch.sparse.mm(torch.eye(4).to_sparse(), first(x)),
    "sparse with sparse": lambda x, first: torch.mm(x.to_sparse(), torch.randn(6, 8)) + first(x),
    "a storage freed and made anew": storage_freed,
    "nested": nested,
    "a sum expanded": lambda x, first: first(x).sum().expand(4, 8) + first(x),
    "a maximum reshaped": lambda x, first: first(x).max().reshape(1, 1) * first(x),
    "quantized": lambda x, first: torch.quantize_per_tensor(first(x), 0.1, 0, torch.qint8),
    "complex": lambda x, first: torch.fft.fft(first(x)).abs(),
    "layouts": layouts,
    "types change": types_change,
    "halves": lambda x, first: first(x).bfloat16().relu().float(),
    "without data": lambda x, first: F.linear(
        first(x).to("meta"), torch.empty(8, 8, device="meta")
    ),
    "a view made without gradients": no_grad_view,
    "rows of a parameter written": rows_written,
    "many outputs": many_outputs,
    # In lists, and so not what distinguishes the operator from others.
    "parameters in lists": lambda x, first: torch.cat(
        [
            torch.einsum("ij,jk->ik", first(x), nn.Parameter(torch.eye(8)))[1:],
            next(first.parameters())[:1, :1].expand(1, 8),
        ]
    ),
    "other numbers of outputs": numbers_of_outputs,
    "other operands": other_operands,
    "other overloads": other_overloads,
    "copied on write": copied_on_write,
    "axes of numbers": axes_of_numbers,
    # NumPy has at most 64 axes.
    "many axes": lambda x, first: first(x) + torch.ones([1] * 70).sum(),
    "integers": integers,
    "a half-built module": lambda x, first: HalfBuilt(x, first)(x),
    "written in place": lambda x, first: first(x).add_(1).relu_(),
    "lists": lambda x, first: torch.cat(torch.stack([first(x), first(x)]).unbind()[:1]),
}


class Network(nn.Module):
    """Two layers with something in between."""

    def __init__(self, hidden: Hidden) -> None:
        super().__init__()
        self.first, self.second, self.hidden = nn.Linear(6, 8), nn.Linear(8, 3), hidden

    def forward(self, x: torch.Tensor) -> Any:
        """Return the logits."""
        hidden = self.hidden(x, self.first)
        if hidden.is_quantized:
            hidden = hidden.dequantize()
        return hidden if hidden.is_meta else self.second(hidden)


def run(hidden: Hidden) -> list[bytes]:
    """Return the results of two steps as bytes."""
    torch.manual_seed(0)
    model, found = Network(hidden), []
    for _ in range(2):
        result = model(torch.randn(4, 6))
        if not result.is_meta:
            if result.requires_grad:
                result.square().sum().backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            tensors = [result.detach(), *(grad for grad in gradients if grad is not None)]
            found += [tensor.numpy().tobytes() for tensor in tensors]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS | EDITING)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs_as_without_it(program: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of prototypes in PyTorch.
        expected = run(PROGRAMS[program])
        tool = (TOOLS | EDITING)[name]()
        with amanda.apply(tool):
            found = run(PROGRAMS[program])
    assert found == expected
    checked(name, tool)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("method", ["dynamic", "lsq"])
def test_programs_run_in_few_bits(program: str, method: Any) -> None:
    tool = Quantize(method)
    with amanda.apply(tool), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of prototypes in PyTorch.
        run(PROGRAMS[program])
    checked("quantize", tool)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "static"},
        {"method": "dynamic"},
        {"method": "dynamic", "per_token": True},
        {"method": "lsq"},
    ],
    ids=str,
)
def test_quantization_of_other_operands_in_each_execution(options: dict[str, Any]) -> None:
    tool = Quantize(**options)
    with amanda.apply(tool):
        run(other_operands)
    assert tool.result().table().rows


@pytest.mark.parametrize("name", ["quantize", "sensitivity"])
def test_a_product_of_matrices_in_a_list(name: str) -> None:
    def hidden(x: torch.Tensor, first: nn.Module) -> Any:
        return torch.linalg.multi_dot([first(x), nn.Parameter(torch.eye(8)), torch.eye(8)])

    expected, tool = run(hidden), TOOLS.get(name, EDITING.get(name))
    assert tool is not None
    with amanda.apply(tool()):
        assert run(hidden) == expected


@pytest.mark.parametrize("method", ["dynamic", "lsq"])
def test_matrices_in_a_list_are_quantized(method: Any) -> None:
    tool = Quantize(method)
    with amanda.apply(tool):
        torch.linalg.multi_dot([torch.ones(2, 3), torch.ones(3, 4), torch.ones(4, 5)])
    assert len(tool.result().table().rows) == 3
