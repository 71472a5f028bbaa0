"""Runs a program without a private symbol of PyTorch, for each of some symbols.

A program of its own, so that PyTorch is damaged in forked processes only. Reads the names of the
symbols from stdin, and writes what happened without each of them to stdout, as JSON. A name is

- ``module:attribute``, or ``module:Class.attribute``,
- ``node:attribute``, of all backward nodes,
- ``symbol:name``, of PyTorch's libraries, or ``layout:part``, of its graphs,
- ``definition:type``, of all bindings of a type, which then cannot be redirected.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

import amanda
from amanda_core.errors import AmandaError

#: What runs: eager operators, or a compiled callable, too.
COMPILED = "--compiled"


#: Kinds of what the extension looks for itself, after the driver is imported.
SOUGHT = ("symbol", "layout", "definition")


def remove(name: str) -> None:
    """Let PyTorch be without a symbol.

    Raises:
        AttributeError: This release is without it anyway.
    """
    kind, _, dotted = name.partition(":")
    if kind in ("symbol", "layout"):
        native: Any = importlib.import_module("amanda_driver_torch._native")
        native.hide(frozenset([dotted]))
    elif kind == "definition":
        native = importlib.import_module("amanda_driver_torch._native")
        define: Any = native.define

        def refuse(binding: Any, *rest: Any) -> Any:
            is_refused = type(binding).__name__ == dotted
            return "its table cannot be written" if is_refused else define(binding, *rest)

        native.define = refuse
    elif kind == "node":
        nodes = [node for node in vars(torch._C._functions).values() if isinstance(node, type)]
        having = [node for node in nodes if dotted in vars(node)]
        for node in having:
            _remove_from_class(node, dotted)
        if not having:
            raise AttributeError(dotted)
    else:
        path, _, attribute = dotted.rpartition(".")
        owner = pkgutil.resolve_name(f"{kind}:{path}")
        if isinstance(owner, type):
            _remove_from_class(owner, attribute)
        else:
            delattr(owner, attribute)


def _remove_from_class(owner: type, attribute: str) -> None:
    # Types in C cannot be changed in Python. The proxy refers to their dict.
    (attributes,) = gc.get_referents(vars(owner))
    if attribute not in attributes:
        raise AttributeError(attribute)
    del attributes[attribute]
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


class Tool(amanda.Tool):
    """Doubles the outputs of linear layers, and counts values and gradients."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}
        self.add_inst_for_op(self.analyse)
        if not compiled:  # There, routines of forward operators look at the gradients.
            self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        name = context.op_type
        context.insert_before_op(self.count(name), observe=True)
        context.insert_before_backward_op(self.count(f"outputs of {name}"), observe=True)
        if name == "linear":
            context.insert_after_op(lambda y: y * 2)
            context.insert_after_backward_op(lambda grad: grad * 2, grad_inputs=[1])

    def analyse_backward(self, context: amanda.OpContext) -> None:
        name = context.get_backward_op().__name__
        context.insert_after_backward_op(self.count(name), observe=True)

    def count(self, what: str) -> Callable[..., None]:
        def routine(*values: Any) -> None:
            self.seen[what] = self.seen.get(what, 0) + 1

        return routine


class Model(torch.nn.Module):
    """Two layers and operators of several kinds between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = (x.T * 2).T.exp()
        found: torch.Tensor = self.second(x).view(-1)
        return found


#: Graphs that were compiled.
GRAPHS: list[torch.fx.GraphModule] = []


def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """Run a graph as it is."""
    GRAPHS.append(graph)
    return graph.forward


def train(compiled: bool) -> list[Any]:
    """Run a model forward and backward four times; return its outputs and gradients."""
    torch.manual_seed(0)
    model, x = Model(), torch.linspace(-1, 1, 12).view(4, 3)
    call: Any = torch.compile(model, backend=backend) if compiled else model
    found = []
    for _ in range(4):
        model.zero_grad()
        y = call(x)
        y.sum().backward()
        grads: list[Any] = [weight.grad for weight in model.parameters()]
        found.append([y.tolist(), *(grad.tolist() for grad in grads)])
    return found


def without(name: str, compiled: bool) -> dict[str, Any]:
    """Return what happens without a symbol: results, and what a tool saw or why it was refused."""
    found: dict[str, Any] = {}
    try:
        if name:
            remove(name)
    except (AttributeError, ImportError, KeyError):
        return {"absent": True}
    try:
        found["plain"] = train(compiled)
    except Exception as error:
        return {"torch": f"{type(error).__name__}: {error}"}
    tool = Tool(compiled)
    before = len(GRAPHS)
    try:
        handle = amanda.attach(tool)
        try:
            found["values"] = train(compiled)
            found["gaps"] = [gap.what for gaps in handle.coverage().values() for gap in gaps]
        finally:
            handle.remove()
        found["compiled"] = len(GRAPHS) > before
        found["seen"] = tool.seen
    except AmandaError as error:
        found["refused"] = str(error)
    except Exception as error:
        found["error"] = "".join(traceback.format_exception(error)[-3:])
        with amanda.apply(Tool(compiled), on_driver_error="skip"):
            found["skipped"] = train(compiled)
    native: Any = sys.modules.get("amanda_driver_torch._native")
    found["graphs"] = native is not None and native.knows_graphs()
    found["after"] = train(compiled) == found["plain"]
    return found


class Process:
    """A process in which a program runs without a symbol."""

    def __init__(self, name: str, compiled: bool) -> None:
        self._reading, writing = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            # Nothing else may go to stdout.
            os.dup2(2, 1)
            with os.fdopen(writing, "w") as stream:
                try:
                    found = without(name, compiled)
                except BaseException as error:
                    found = {"error": "".join(traceback.format_exception(error))}
                json.dump(found, stream)
            os._exit(0)
        os.close(writing)

    def result(self) -> dict[str, Any]:
        """Wait for what happens."""
        with os.fdopen(self._reading) as stream:
            text = stream.read()
        _, status = os.waitpid(self._process, 0)
        found: dict[str, Any] = json.loads(text) if text else {"error": f"it ended with {status}"}
        return found


#: How many processes run at the same time.
AT_ONCE = 4


def main() -> None:
    """Run without each symbol."""
    torch.set_num_threads(1)
    compiled = COMPILED in sys.argv
    if compiled:
        for module in ("_dynamo", "_inductor.config", "_inductor.scheduler"):
            importlib.import_module(f"torch.{module}")  # Once for all processes.
    names = sorted(json.load(sys.stdin), key=lambda name: name.startswith(SOUGHT))
    found, running = {}, dict[str, Process]()
    for name in [*names, None]:
        if name is not None and name.startswith(SOUGHT):
            importlib.import_module("amanda_driver_torch.interception.native_interceptor")
        while len(running) >= (1 if name is None else AT_ONCE):
            first = next(iter(running))
            found[first] = running.pop(first).result()
        if name is not None:
            running[name] = Process(name, compiled)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
