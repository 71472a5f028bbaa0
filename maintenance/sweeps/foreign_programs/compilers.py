"""Programs with compilers, exports, scripts and `torch.func`."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# Much in torch and the libraries is not annotated.

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from maintenance.sweeps.foreign import Note

from .catalog import EPOCH, EPOCH_BACKWARD, SAVES, net, program, samples, train

COMPILED = r"compiled|eagerly"
TRANSFORMS = r"torch\.func"


def _compiled(backend: str) -> Callable[[Note], None]:
    def run(note: Note) -> None:
        torch._dynamo.reset()
        model = net()
        part: Any = nn.Sequential(model[0], nn.Tanh())
        model[0] = torch.compile(part, backend=backend)  # type: ignore[assignment]
        eagerly: Any = contextlib.nullcontext()
        if backend == "inductor":
            # Its kernels round differently, whatever it compiles.
            eagerly = (
                torch.compiler.set_stance("force_eager")
                if note.plain
                else mock.patch.dict(os.environ, AMANDA_TORCH_COMPILED="eager")
            )
        with eagerly:
            train(note, model, DataLoader(samples(), 4))
        torch._dynamo.reset()

    return run


for _backend in ("eager", "aot_eager", "inductor"):
    program(
        f"compiled parts: {_backend}",
        {**EPOCH, "tanh": 3},
        EPOCH_BACKWARD,
        notice=f"({COMPILED})?",
    )(_compiled(_backend))


@program("export, save, load, run", {"linear": 4, "relu": 2}, {"AddmmBackward0": 2})
def export(note: Note) -> None:
    """Export a module, write and read it, and train the result."""
    model, features = net().eval(), torch.randn(4, 6)
    exported = torch.export.export(model, (features,))
    note("graph", exported.graph_module.code)
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    module = torch.export.load(stored).module()
    note("output", model(features))
    loss = module(features).square().sum()
    loss.backward()
    note("gradients", [parameter.grad for parameter in module.parameters()])


@program("jit: script, trace, save, load", {"linear": 2, "relu": 1})
def scripts(note: Note) -> None:
    """Run scripted and traced modules with gradients; each is one opaque op."""
    model, features = net().eval(), torch.randn(4, 6)
    for made in (torch.jit.script(model), torch.jit.trace(model, features)):
        stored = io.BytesIO()
        torch.jit.save(made, stored)
        stored.seek(0)
        loaded = torch.jit.load(stored)
        note("code", loaded.code)
        for module in (made, loaded):
            module(features).sum().backward()
            note("gradients", [parameter.grad for parameter in module.parameters()])
    note("output", model(features))


@program("fx: symbolic trace, transform, run", {"linear": 4, "relu": 1, "tanh": 1})
def fx(note: Note) -> None:
    """Trace a module, insert another op into the graph, and run both."""
    model, features = net().eval(), torch.randn(4, 6)
    traced = torch.fx.symbolic_trace(model)
    note("code", traced.code)
    for node in traced.graph.nodes:
        if node.op == "call_module" and node.target == "1":
            with traced.graph.inserting_after(node):
                new = traced.graph.call_function(torch.tanh, (node.args[0],))
            node.replace_all_uses_with(new)
            traced.graph.erase_node(node)
            break
    traced.recompile()
    note("changed", traced(features))
    note("output", model(features))


@program("fake tensors, meta device", {"linear": 2, "relu": 1}, notice=SAVES)
def fake(note: Note) -> None:
    """Compute shapes without values, then values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = net().eval()
    with FakeTensorMode(allow_non_fake_inputs=True):
        shaped = model(torch.empty(5, 6))
        note("shape", tuple(shaped.shape))
    with torch.device("meta"):
        empty = net()
    note("meta", [tuple(p.shape) for p in empty.parameters()])
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(model.state_dict())
    note("output", filled.eval()(torch.randn(4, 6)))


@program("torch.func: grad, vmap, jacrev, hessian", {"exp": 1}, notice=TRANSFORMS)
def transforms(note: Note) -> None:
    """Transform functions, also nested, and run an op outside the transforms."""
    from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    x = torch.randn(3, 4)
    note("vmap", vmap(function)(x))
    note("grad", grad(function)(x))
    note("vmap of grad", vmap(grad(function))(x))
    note("jacrev", jacrev(torch.sin)(x[0]))
    note("jacfwd", jacfwd(torch.sin)(x[0]))
    note("hessian", hessian(function)(x[0]))
    note("jvp", jvp(function, (x,), (torch.ones_like(x),)))
    made: Any = vjp(function, x)
    note("vjp", (made[0], made[1](torch.ones(()))))
    note("outside", x.exp())


@program(
    "torch.func: functional_call, ensembles, per-sample gradients",
    {"linear": 2, "relu": 1},
    notice=TRANSFORMS,
)
def functional(note: Note) -> None:
    """Call modules as functions of their parameters."""
    from torch.func import functional_call, grad, stack_module_state, vmap

    models: Any = [net().eval() for _ in range(3)]
    features, labels = torch.randn(4, 6), torch.randint(0, 3, (4,))
    state = {name: p.detach() * 2 for name, p in models[0].named_parameters()}
    note("called", functional_call(models[0], state, (features,)))
    stacked, buffers = stack_module_state(models)

    def one(parameters: Any, data: Any) -> Any:
        return functional_call(models[0], (parameters, buffers), (data,))

    note("ensemble", vmap(one, (0, None))(stacked, features))

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy(functional_call(models[0], parameters, (x[None],)), y[None])

    note("per sample", list(vmap(grad(loss), (None, 0, 0))(state, features, labels).values()))
