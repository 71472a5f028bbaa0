"""Programs with tensors of every layout and class, and lines on which others' programs failed."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# Much in torch and the libraries is not annotated.

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from maintenance.sweeps.foreign import Note

from .catalog import SAVES, WRITTEN, net, program, samples, train
from .compilers import COMPILED

_DENSE = torch.tensor([[0.0, 2.0, 0.0, 4.0], [1.5, 0.0, -3.0, 0.0]])
#: Layout or class -> converts a dense tensor to it.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": lambda dense: dense.clone(),
    "transposed": lambda dense: dense.clone().t(),
    "conjugate": lambda dense: torch.complex(dense, dense).conj(),
    "negative": lambda dense: torch.complex(dense, dense).conj().imag,
    "sparse COO": lambda dense: dense.to_sparse_coo(),
    "sparse COO, not coalesced": lambda dense: torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1], [1, 1, 2]]), [1.0, 2.0, 3.0], dense.shape
    ),
    "sparse CSR": lambda dense: dense.to_sparse_csr(),
    "sparse CSC": lambda dense: dense.to_sparse_csc(),
    "sparse BSR": lambda dense: dense.to_sparse_bsr((1, 2)),
    "sparse BSC": lambda dense: dense.to_sparse_bsc((1, 2)),
    "mkldnn": lambda dense: dense.to_mkldnn(),
    "nested": lambda dense: torch.nested.nested_tensor([dense[0, :3], dense[1]]),
    "jagged": lambda dense: torch.nested.nested_tensor(
        [dense[0, :3], dense[1]], layout=torch.jagged
    ),
    "masked": lambda dense: torch.masked.masked_tensor(dense.clone(), dense != 0),
    "inference": lambda dense: _inference(dense),
    "meta": lambda dense: dense.to("meta"),
}
#: In-place operator -> its further arguments for a tensor.
IN_PLACE: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    **{name: lambda t: () for name in ("zero_", "neg_", "abs_", "sin_", "relu_", "sqrt_", "t_")},
    **{name: lambda t: (2.0,) for name in ("mul_", "div_", "add_", "sub_", "pow_", "fill_")},
    "add_ of itself": lambda t: (t,),
    "mul_ of itself": lambda t: (t,),
    "copy_ of itself": lambda t: (t,),
    "clamp_": lambda t: (-1.0, 1.0),
    "masked_fill_": lambda t: (torch.tensor(True), 1.0),
    "normal_": lambda t: (),
    "resize_as_": lambda t: (t,),
}


def _inference(dense: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return dense.clone()


@program(
    "in-place operators on every layout",
    left_alone={"add_": "compressed sparse tensors accept only themselves"},
)
def in_place(note: Note) -> None:
    """Call each in-place operator on a tensor of each layout, and record the result or the
    error.
    """
    for layout, make in LAYOUTS.items():
        _write_in_place(note, layout, make)


@program(
    "in-place operators on expanded tensors",
    left_alone={
        name.removesuffix(" of itself"): "nothing can be written into memory that elements share"
        for name in IN_PLACE
    },
)
def expanded(note: Note) -> None:
    """Call the same operators on a tensor whose rows share their memory."""
    _write_in_place(note, "expanded", lambda dense: dense[:1].expand(2, 4))


def _write_in_place(note: Note, layout: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name, arguments in IN_PLACE.items():
        tensor = make(_DENSE.clone())
        method = name.removesuffix(" of itself")
        try:
            result = getattr(tensor, method)(*arguments(tensor))
        except (RuntimeError, TypeError, NotImplementedError) as error:
            # Without addresses, which some messages contain.
            message = re.sub(r"0x[0-9a-f]+", "", str(error).splitlines()[0])
            note(f"{layout}: {name}: error", (type(error).__name__, message))
            continue
        note(f"{layout}: {name}: same", result is tensor)
        if layout != "meta":
            note(f"{layout}: {name}", _plain(tensor))


def _plain(tensor: Any) -> Any:
    """Return what to record of a tensor; some classes have their values inside."""
    if hasattr(tensor, "get_data"):
        return [tensor.get_data(), tensor.get_mask()]
    if tensor.is_nested:
        return [part.clone() for part in tensor.unbind()]
    return tensor


@program(
    "rows of a leaf and of views, written without gradients", left_alone={"__getitem__": WRITTEN}
)
def rows(note: Note) -> None:
    """Perform stochastic gradient descent by hand, on rows and slices of parameters."""
    weight = nn.Parameter(torch.randn(6, 4))
    for _ in range(3):
        (weight.square().sum() + weight[1].sum()).backward()
        assert weight.grad is not None
        with torch.no_grad():
            weight[3] += 1
            weight[2:] *= 2
            for row in range(6):
                weight[row] -= 0.1 * weight.grad[row]
            view = weight[1:]
            view += 1
            note("sum", torch.zeros(5, 4) + view)
        note("weight", [weight, weight.grad])
        weight.grad = None
    base = torch.ones(3)
    with torch.no_grad():
        half = base[:2]
    base.requires_grad_()
    note("a view made without gradients", half * 2)
    with torch.inference_mode():
        inside = torch.ones(3)[:2]
    note("a view made in inference mode", inside * 2)


@program("many tensors: clipping 40 gradients, unbind(40), split, rows", {"unbind": 6})
def many(note: Note) -> None:
    """Use operators with more outputs or inputs than a table of fixed size would hold."""
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(40)]
    for step in range(2):
        torch.stack([p.square().sum() for p in parameters]).sum().backward()
        note(f"norm {step}", torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        note(f"clipped {step}", [p.grad for p in parameters])
    for step in range(2):
        table = torch.randn(40, 3, requires_grad=True)
        parts = [*table.unbind(), *table.split(1), *table.chunk(40)]
        torch.stack([part.sum() * number for number, part in enumerate(parts)]).sum().backward()
        note(f"rows {step}", [table.grad, [row * 2 for row in table]])
        note(f"unbind {step}", torch.unbind(table))


@program("SparseAdam, gradients set to zero")
def sparse_adam(note: Note) -> None:
    """Train an embedding with sparse gradients, which are kept and cleared in place."""
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss = embedding(torch.tensor([1, 4, 4, step])).square().sum()
        loss.backward()
        optimizer.step()
        gradient: Any = embedding.weight.grad
        note(f"step {step}", [loss, embedding.weight, gradient.coalesce()])


@program("torch.compile(fullgraph=True)", notice=f"({COMPILED})?")
def fullgraph(note: Note) -> None:
    """Compile a module that must be one graph, and a function."""
    torch._dynamo.reset()
    model = torch.compile(net(), fullgraph=True, backend="eager")
    train(note, model, DataLoader(samples(), 4))
    step = torch.compile(lambda x: torch.sin(x) * 2, fullgraph=True, backend="eager")
    note("function", step(torch.randn(3)))
    torch._dynamo.reset()


@program("flex_attention without compiling", notice=f"({COMPILED})?")
def flex(note: Note) -> None:
    """Call `flex_attention`, which compiles internally without being asked to.

    On a CPU it has no backward.
    """
    from torch.nn.attention import flex_attention as module

    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query >= key

    mask = module.create_block_mask(causal, None, None, 16, 16, device="cpu")
    values = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    attention: Any = module.flex_attention
    note("attention", attention(*values, block_mask=mask))


class _Lists(nn.Module):
    """Operators that take lists of tensors, which contain proxies under a tracer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.first(x), self.second(x)
        both = torch.cat([first, second], dim=1) + torch.hstack((second, first))
        parts = torch.stack([both, both * 2]).unbind(0)
        return torch.einsum("ij,ij->i", parts[0], F.relu(parts[1]))


# Once in the module and once in the traced graph; nothing is counted during tracing.
@program("fx and make_fx: proxies in lists", {"cat": 2, "stack": 2, "linear": 4})
def proxies(note: Note) -> None:
    """Trace a module whose operators take lists, and run both."""
    from torch.fx.experimental.proxy_tensor import make_fx

    model, x = _Lists(), torch.randn(3, 4)
    traced = torch.fx.symbolic_trace(model)
    note("code", traced.code)
    note("symbolic", [model(x), traced(x)])
    note("make_fx", make_fx(model)(x).code)


def _operators(logs: list[str]) -> list[str]:
    """Return the logged operators without the `detach` of nodes where a gradient is edited."""
    names = re.findall(r"aten\.(\w+)", "\n".join(logs))
    return [name for name in names if name != "detach"]


@program("logging tensors and modes")
def logging(note: Note) -> None:
    """Use torch's own tensors and modes for tests, which log the operators below autograd."""
    from torch.testing._internal.logging_tensor import (
        LoggingTensor,
        LoggingTensorMode,
        capture_logs,
    )

    with capture_logs() as logs:
        x: Any = LoggingTensor(torch.ones(3), requires_grad=True)
        y: Any = (x * 2).sum()
        (gradient,) = torch.autograd.grad(y, x)
        z = torch.zeros(3)
        z.add_(x.elem)
    note.events("tensors", _operators(logs))
    note("values", [y.elem, gradient.elem, z])
    with capture_logs(is_mode=True) as logs, LoggingTensorMode():
        weight = torch.ones(3, 3, requires_grad=True)
        torch.mm(weight, weight).relu().sum().backward()
    note.events("mode", _operators(logs))


@program("swap_tensors, to and to_empty inside", notice=SAVES)
def swapped(note: Note) -> None:
    """Convert modules by swapping their parameters."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model, x = net().eval(), torch.randn(3, 6)
        note("before", model(x))
        model.to(torch.float64)
        note("double", model(x.double()))
        model.half().float()
        note("float", model(x))
        empty = net().to("meta").to_empty(device="cpu")
        empty.load_state_dict(model.state_dict())
        note("filled", empty.eval()(x))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    torch.utils.swap_tensors(one, two)
    note("swapped", [one * 2, two * 3])


@program(
    "torchao: quantized weights, 8-bit AdamW",
    needs=("torchao",),
    notice=f"({COMPILED})?",
    left_alone={"detach": WRITTEN},
)
def torchao(note: Note) -> None:
    """Use, move and train weights of torchao's classes.

    Its optimizers compile inside, which rounds differently; the plain run compiles nothing, as
    runs under tools.
    """
    optimizers: Any = importlib.import_module("torchao.optim")
    quantization: Any = importlib.import_module("torchao.quantization")
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(4, 64)
    note("before", model(x))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    note("quantized", model(x))
    model.to(torch.device("cpu")).to(torch.float32)
    note("moved", model(x))
    trained = nn.Linear(64, 64)
    optimizer = optimizers.AdamW8bit(trained.parameters())
    with torch.compiler.set_stance("force_eager" if note.plain else "default"):
        for step in range(2):
            optimizer.zero_grad()
            trained(x).square().mean().backward()
            optimizer.step()
            note(f"step {step}", list(trained.parameters()))
