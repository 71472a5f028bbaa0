"""Operators of every kind that is measured: those of BERT, GPT-2, ResNet and Mixtral, and of every
form of call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["KINDS", "Kind", "Repeated"]


class Kind(NamedTuple):
    """One kind of call.

    Attributes:
        op_type: Type of the operator that is measured. Others in `call` prepare its arguments.
        call: Makes the call, given the values of a `Repeated`.
    """

    op_type: str
    call: Callable[[Any], Any]


#: By name.
KINDS: dict[str, Kind] = {
    "linear": Kind("linear", lambda m: F.linear(m.x, m.w, m.b)),
    "linear, 2-D": Kind("linear", lambda m: F.linear(m.rows, m.w, m.b)),
    "linear, no bias": Kind("linear", lambda m: F.linear(m.x, m.w)),
    "addmm": Kind("addmm", lambda m: torch.addmm(m.b, m.rows, m.w)),
    "matmul": Kind("matmul", lambda m: torch.matmul(m.x, m.x.mT)),
    "bmm": Kind("bmm", lambda m: torch.bmm(m.x, m.square)),
    "conv2d": Kind("conv2d", lambda m: F.conv2d(m.image, m.filters, m.channel, padding=1)),
    "batch_norm": Kind(
        "batch_norm",
        lambda m: F.batch_norm(m.image, m.mean, m.var, m.channel, m.channel, m.training),
    ),
    "layer_norm": Kind("layer_norm", lambda m: F.layer_norm(m.x, (16,), m.b, m.b)),
    "embedding": Kind("embedding", lambda m: F.embedding(m.ids, m.table)),
    "attention": Kind(
        "scaled_dot_product_attention",
        lambda m: F.scaled_dot_product_attention(m.heads, m.heads, m.heads, scale=0.3),
    ),
    "max_pool2d": Kind("max_pool2d", lambda m: F.max_pool2d(m.image, 2)),
    "adaptive_avg_pool2d": Kind("adaptive_avg_pool2d", lambda m: F.adaptive_avg_pool2d(m.image, 1)),
    "dropout": Kind("dropout", lambda m: F.dropout(m.x, 0.1, m.training)),
    "relu": Kind("relu", lambda m: F.relu(m.x)),
    "gelu, keyword": Kind("gelu", lambda m: F.gelu(m.x, approximate="tanh")),
    "silu": Kind("silu", lambda m: F.silu(m.x)),
    "tanh": Kind("tanh", lambda m: torch.tanh(m.x)),
    "softmax": Kind("softmax", lambda m: F.softmax(m.x, dim=-1)),
    "softmax, dtype": Kind("softmax", lambda m: F.softmax(m.x, dim=-1, dtype=torch.float)),
    "+": Kind("add", lambda m: m.x + m.x),
    "+ parameter": Kind("add", lambda m: m.x + m.b),
    "* number": Kind("mul", lambda m: m.x * 2),
    "number /": Kind("reciprocal", lambda m: 1 / m.x),
    "** number": Kind("pow", lambda m: m.x**3.0),
    "-": Kind("neg", lambda m: -m.x),
    "==": Kind("eq", lambda m: m.x == 0),
    "rsqrt": Kind("rsqrt", lambda m: torch.rsqrt(m.positive)),
    "mean": Kind("mean", lambda m: m.x.mean(-1, keepdim=True)),
    "sum": Kind("sum", lambda m: m.x.sum()),
    "sum, keywords": Kind("sum", lambda m: m.x.sum(dim=(0, 1), keepdim=True)),
    "cross_entropy": Kind(
        "cross_entropy_loss", lambda m: F.cross_entropy(m.rows, m.classes, ignore_index=-100)
    ),
    "view": Kind("view", lambda m: m.x.view(2, 8, 4, 4)),
    "view, list": Kind("view", lambda m: m.x.view([16, 16])),
    "view, size": Kind("view", lambda m: m.x.view(m.x.shape)),
    "reshape": Kind("reshape", lambda m: m.x.reshape(16, -1)),
    "flatten": Kind("flatten", lambda m: m.x.flatten(1)),
    "transpose": Kind("transpose", lambda m: m.x.transpose(1, 2)),
    "permute": Kind("permute", lambda m: m.x.permute(0, 2, 1)),
    "expand": Kind("expand", lambda m: m.x.expand(2, -1, -1)),
    "unsqueeze": Kind("unsqueeze", lambda m: m.x.unsqueeze(0)),
    "contiguous, same": Kind("contiguous", lambda m: m.x.contiguous()),
    "contiguous, copy": Kind("contiguous", lambda m: m.square.mT.contiguous()),
    "to, same": Kind("to", lambda m: m.x.to(torch.float32)),
    "to, dtype": Kind("to", lambda m: m.x.to(torch.float64)),
    "float": Kind("float", lambda m: m.x.float()),
    "[number]": Kind("__getitem__", lambda m: m.x[0]),
    "[slices]": Kind("__getitem__", lambda m: m.x[:, None, 1:4]),
    "[tensor]": Kind("__getitem__", lambda m: m.x[:, m.ids[0]]),
    "[slice] =": Kind("__setitem__", lambda m: m.fresh.__setitem__(0, 1.0)),
    "index_select": Kind("index_select", lambda m: torch.index_select(m.x, 1, m.ids[0])),
    "gather": Kind("gather", lambda m: m.x.gather(2, m.places)),
    "T": Kind("T", lambda m: m.w.T),
    "mT": Kind("mT", lambda m: m.x.mT),
    "split": Kind("split", lambda m: m.x.split(8, dim=2)),
    "chunk": Kind("chunk", lambda m: m.x.chunk(2, dim=-1)),
    "unbind": Kind("unbind", lambda m: m.x.unbind(0)),
    "topk": Kind("topk", lambda m: m.x.topk(2, dim=-1)),
    "max": Kind("max", lambda m: m.x.max(dim=-1)),
    "cat": Kind("cat", lambda m: torch.cat([m.x, m.x], dim=-1)),
    "stack": Kind("stack", lambda m: torch.stack([m.x, m.x])),
    "where": Kind("where", lambda m: torch.where(m.mask, m.x, m.x)),
    "where, places": Kind("where", lambda m: torch.where(m.mask)),
    "masked_fill": Kind("masked_fill", lambda m: m.x.masked_fill(m.mask, 0.0)),
    "add_": Kind("add_", lambda m: m.fresh.add_(m.x)),
    "+=": Kind("add_", lambda m: m.fresh.__iadd__(m.x)),
    "relu_": Kind("relu_", lambda m: F.relu(m.fresh, inplace=True)),
    "index_add_": Kind("index_add_", lambda m: m.fresh.index_add_(1, m.ids[0], m.x)),
    "add, out=": Kind("add", lambda m: torch.add(m.places, m.places, out=m.places)),
    "arange": Kind("arange", lambda m: torch.arange(8, device="cpu")),
    "zeros": Kind("zeros", lambda m: torch.zeros(2, 8, dtype=torch.float)),
    "zeros_like": Kind("zeros_like", lambda m: torch.zeros_like(m.x)),
    "full": Kind("full", lambda m: torch.full((2, 8), 1.0)),
    "new_zeros": Kind("new_zeros", lambda m: m.x.new_zeros(2, 3)),
    "cumsum": Kind("cumsum", lambda m: torch.cumsum(m.ids, dim=1)),
    "tril": Kind("tril", lambda m: torch.tril(m.x)),
    "einsum": Kind("einsum", lambda m: torch.einsum("bij,jk->bik", m.x, m.w)),
    "one_hot": Kind("one_hot", lambda m: F.one_hot(m.ids, 8)),
    "argmax": Kind("argmax", lambda m: m.x.argmax(-1)),
    "nonzero": Kind("nonzero", lambda m: m.mask.nonzero()),
    "clone": Kind("clone", lambda m: m.x.clone()),
    "detach": Kind("detach", lambda m: m.x.detach()),
    "pad": Kind("pad", lambda m: F.pad(m.x, (0, 1), value=0.0)),
    "any": Kind("any", lambda m: m.mask.any()),
    "&": Kind("bitwise_and", lambda m: m.mask & m.mask),
    "~": Kind("bitwise_not", lambda m: ~m.mask),
    "number -": Kind("rsub", lambda m: 1.0 - m.x),
    "//": Kind("floor_divide", lambda m: m.ids // 2),
    "/=": Kind("div_", lambda m: m.fresh.__itruediv__(m.positive)),
    "isin": Kind("isin", lambda m: torch.isin(m.ids, m.places)),
    "sort": Kind("sort", lambda m: torch.sort(m.rows, dim=-1)),
    "histc": Kind("histc", lambda m: torch.histc(m.rows, bins=4, min=0, max=3)),
    "grouped_mm": Kind(
        "_grouped_mm", lambda m: torch._grouped_mm(m.rows, m.square, offs=m.offsets)
    ),
    "tensor": Kind("tensor", lambda m: torch.tensor(1.0)),
    "empty_like": Kind("empty_like", lambda m: torch.empty_like(m.x)),
    "cos": Kind("cos", lambda m: m.x.cos()),
    "logsumexp": Kind("logsumexp", lambda m: torch.logsumexp(m.x, -1)),
}


class Repeated(nn.Module):
    """Makes calls of one kind, of which each is an operator of its own.

    Args:
        kind: The kind.
        times: The number of calls.
    """

    x: torch.Tensor
    #: Those of the results, once they are known.
    gradients: list[torch.Tensor] | None = None

    def __init__(self, kind: Kind, times: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.times = kind, times
        self.w, self.b = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16))
        self.filters = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.channel = nn.Parameter(torch.randn(4))
        self.table = nn.Parameter(torch.randn(32, 16))
        self.mean, self.var = torch.zeros(4), torch.ones(4)
        self.ids, self.classes = torch.arange(8)[None], torch.zeros(16).long()
        self.offsets = torch.tensor([8, 16], dtype=torch.int32)
        self.places = torch.zeros(2, 8, 1).long()
        self.leaves = {
            "x": torch.randn(2, 8, 16),
            "rows": torch.randn(16, 16),
            "square": torch.randn(2, 16, 16),
            "heads": torch.randn(1, 2, 8, 8),
            "image": torch.randn(1, 4, 8, 8),
            "positive": torch.rand(2, 8, 16) + 1,
        }
        self.mask = self.leaves["x"] > 0

    def prepare(self) -> None:
        """Make the values of one run; these are results of operators, as in a model."""
        grad = torch.is_grad_enabled()
        for name, leaf in self.leaves.items():
            setattr(self, name, leaf.requires_grad_(grad) * 1)

    @property
    def fresh(self) -> torch.Tensor:
        """A tensor that may be written."""
        return self.x * 1

    def forward(self) -> list[Any]:
        """Return the results of the calls."""
        call = self.kind.call
        return [call(self) for _ in range(self.times)]

    @staticmethod
    def differentiable(results: Any) -> list[torch.Tensor]:
        """Return the tensors in results that have a gradient."""
        leaves = torch.utils._pytree.tree_leaves(results)
        return [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
