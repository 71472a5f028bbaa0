"""Programs with kinds of tensors and weights, user-defined functions, copies and files."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# Much in torch and the libraries is not annotated.

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn

from maintenance.sweeps.foreign import Note

from .catalog import SAVES, WRITTEN, net, program


@program("dtypes: double, half, complex, integers", {"matmul": 4})
def dtypes(note: Note) -> None:
    """Compute the same in several dtypes, with conversions between them."""
    for dtype in (torch.double, torch.half, torch.bfloat16, torch.cfloat):
        weight = torch.randn(4, 4).to(dtype).requires_grad_()
        result = torch.randn(3, 4).to(dtype) @ weight
        (result.abs().double() * torch.arange(4)).sum().backward()
        note(str(dtype), [result, weight.grad])


@program("pickle, deepcopy, save, load", {"linear": 8, "relu": 4, "dropout": 4}, notice=SAVES)
def copies(note: Note) -> None:
    """Copy a model in all ways, run each copy, and compare the bytes with those without tools."""
    model, features = net(), torch.randn(4, 6)
    stored, whole = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), stored)
    torch.save(model, whole)
    pickled = pickle.dumps(model)
    # A storage pickled by itself contains its address.
    note("bytes", (stored.getvalue(), whole.getvalue()))
    stored.seek(0)
    whole.seek(0)
    loaded = net()
    loaded.load_state_dict(torch.load(stored))
    others = [
        loaded,
        torch.load(whole, weights_only=False),
        pickle.loads(pickled),
        copy.deepcopy(model),
    ]
    for other in others:
        note("output", other(features))
        note("parameters", list(other.parameters()))
    result = others[-1][0].weight * 1
    note("views", (copy.deepcopy(result.detach()), pickle.loads(pickle.dumps(result.detach()))))


@program("autograd.Function, double backward, gradient penalty", {"tanh": 3})
def penalty(note: Note) -> None:
    """Compute gradients of gradients through a user-defined function."""

    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return grad * 3 * x**2

    for _ in range(3):
        x = torch.randn(4, requires_grad=True)
        y = torch.tanh(Cubed.apply(x)).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (gradient.square().sum() + y).backward()
        note("gradients", [gradient, x.grad])


@program(
    "parametrizations and pruning",
    {"linear": 4},
    left_alone=dict.fromkeys(("diagonal", "view"), WRITTEN),
)
def parametrizations(note: Note) -> None:
    """Use computed weights: spectral and weight norm, orthogonal, pruned, lazy."""
    from torch.nn.utils import parametrizations, prune

    layers: list[Any] = [
        parametrizations.weight_norm(nn.Linear(6, 6)),
        parametrizations.spectral_norm(nn.Linear(6, 6)),
        parametrizations.orthogonal(nn.Linear(6, 6)),
        nn.LazyLinear(6),
    ]
    prune.random_unstructured(layers[0], "bias", amount=0.5)
    model = nn.Sequential(*layers)
    output = model(torch.randn(4, 6))
    output.square().mean().backward()
    note("output", output)
    note("parameters", list(model.parameters()))
    note("gradients", [parameter.grad for parameter in model.parameters()])


@program(
    "recurrent nets: packed sequences, states carried on",
    {"lstm": 2, "gru": 2, "lstm_cell": 3},
)
def recurrent(note: Note) -> None:
    """Run recurrent layers and pass their hidden states on."""
    lstm, gru, cell = (
        nn.LSTM(3, 4, 2, dropout=0.2),
        nn.GRU(4, 4, bidirectional=True),
        nn.LSTMCell(8, 4),
    )
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 3) for n in (5, 3, 2)])
    state: Any = None
    for _ in range(2):
        output, state = lstm(packed, state)
        state = tuple(s.detach() for s in state)
        padded, _ = nn.utils.rnn.pad_packed_sequence(output)
        both, _ = gru(padded)
        both.square().sum().backward()
        note("output", both)
    carried: Any = None
    for step in both.detach()[:3]:
        carried = cell(step, carried)
    carried[0].sum().backward()
    for layer in (lstm, gru, cell):
        note("gradients", [parameter.grad for parameter in layer.parameters()])


class Labelled(torch.Tensor):
    """A subclass that is preserved by operators."""


@program(
    "subclasses, nested and sparse tensors, views",
    {"embedding": 2},
    left_alone=dict.fromkeys(("__getitem__", "t"), WRITTEN),
)
def kinds(note: Note) -> None:
    """Use tensors that are not plain."""
    labelled = torch.randn(3, 4).as_subclass(Labelled)
    note("class", type(labelled * 2 + 1).__name__)
    note("value", labelled.exp().sum())
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    note("nested", torch.nested.to_padded_tensor(nested * 2, 0.0))
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([1, 3, 3])).square().sum().backward()
        optimizer.step()
        note("table", [table.weight, table.weight.grad])
    base = torch.randn(4, 4, requires_grad=True)
    written = base * 1
    written[1:].mul_(2)
    written.t()[0].add_(1)
    written.sum().backward()
    note("views", [written, base.grad])
