"""A graph that Dynamo has traced: the values of its nodes in analysis, and what is written into it.

Owns where the tensors that staged routines refer to are in the graph, and the nodes in the place of
those that were analysed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from amanda_driver_torch.compiled.execution import Lifted
from amanda_driver_torch.compiled.host import Host, Row
from amanda_driver_torch.compiled.operators import Woven
from amanda_driver_torch.torch_internals.dynamo import (
    FakeTensor,
    add_buffer,
    enable_python_dispatcher,
    tree_leaves,
    tree_map,
    with_arguments,
)
from amanda_driver_torch.torch_internals.internals import is_view

__all__ = ["SYMBOLIC", "TracedGraph", "example", "is_real", "is_static", "touches_tensors"]

#: Types of numbers that are not known before a graph runs.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class TracedGraph:
    """A graph that is being analysed.

    Args:
        module: The graph.
        host: Keeps what graphs refer to weakly.

    Attributes:
        fake_mode: The mode of its fake tensors, or None.
        runs: Graph of a checkpointed function -> the node that runs it.
    """

    def __init__(self, module: fx.GraphModule, host: Host) -> None:
        self.module, self._host = module, host
        # That of the values: for the backend there is another one.
        self.fake_mode = next(
            (
                value.fake_mode
                for node in module.graph.nodes
                for value in tree_leaves(example(node))
                if isinstance(value, FakeTensor)
            ),
            None,
        )
        #: id of a tensor that routines refer to -> the tensor, and a fake one.
        self._lifted: dict[int, tuple[torch.Tensor, Any]] = {}
        #: The node with the number of a row, in code that several places share; it is in a copy.
        self._row: fx.Node | None = None
        #: Name -> argument of this code.
        self._arguments: dict[str, fx.Node] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self.runs: dict[fx.Graph, fx.Node] = {}

    def given(self, node: fx.Node) -> Any:
        """Return the arguments of a node in analysis."""
        return self.values((node.args, node.kwargs))

    def values(self, arguments: Any) -> Any:
        """Return arguments with the values of nodes in analysis."""
        return fx.node.map_arg(arguments, self._fake)

    def _fake(self, node: fx.Node) -> Any:
        if node.op == "get_attr" and "example_value" not in node.meta:
            owner: Any = node.graph.owning_module
            for name in str(node.target).split("."):
                owner = getattr(owner, name)
            if isinstance(owner, torch.Tensor) and self.fake_mode is not None:
                node.meta["example_value"] = self.fake_mode.from_tensor(owner)
            else:
                return owner
        return example(node)  # None for the parts of context managers such as `record_function`.

    def find_lifted(self, node: fx.Node, woven: Woven, analyses: bool = False) -> None:
        """Run a node on fake tensors once, and note the real ones that its routines use.

        Args:
            node: The node.
            woven: Its plans.
            analyses: Whether to differentiate it, so that its backward operators are analysed.
        """
        fake_mode = self.fake_mode
        if fake_mode is None:
            return
        args, kwargs = self.given(node)
        used: dict[int, torch.Tensor] = {}

        def lift(tensor: torch.Tensor) -> Any:
            if isinstance(tensor, FakeTensor):
                return None
            if id(tensor) not in self._lifted:
                fake = fake_mode.from_tensor(tensor, static_shapes=True)
                self._lifted[id(tensor)] = tensor, fake
            used[id(tensor)] = tensor
            return self._lifted[id(tensor)][1]

        # Of what the run writes nothing may remain. What is the same tensor remains the same.
        copies: dict[int, Any] = {}
        sources: list[torch.Tensor] = []

        def copied(value: Any) -> Any:
            if id(value) not in copies:
                copies[id(value)] = _copied(value, sources)
            return copies[id(value)]

        records_gradients = torch.is_grad_enabled() or bool(_differentiable(example(node)))
        # As where AOTAutograd traces: some operators are composed of others there.
        with torch.set_grad_enabled(records_gradients), enable_python_dispatcher():
            args, kwargs = tree_map(copied, (args, kwargs))
            found = woven.run(args, kwargs, lifted := Lifted(lift, woven.trace))
            results = _differentiable((found, args, kwargs))  # It may have written some.
            if sources and results and (analyses or woven.stages_gradients):
                seeds = [torch.ones_like(result) for result in results]
                torch.autograd.grad(results, sources, seeds, allow_unused=True)
        lifted.end()
        woven.trace.end()
        woven.lifted = list(used.values())

    def take_row(self, row: Row) -> None:
        """Go on with a copy of the graph that takes what it gets of a place, such as `row`."""
        names = ["amanda_row", *(self._name(tensor) for tensor in row.given[1:])]
        self.module, self._copies, given = with_arguments(self.module, names)
        self._row = given[0]
        self._arguments = dict(zip(names, given, strict=True))
        if self.fake_mode is not None:
            self._row.meta["example_value"] = self.fake_mode.from_tensor(row.given[0])
        for tensor, argument in zip(row.given[1:], given[1:], strict=True):
            argument.meta["example_value"] = self._lifted[id(tensor)][1]

    def write(self, woven: Sequence[tuple[fx.Node, Woven]]) -> None:
        """Write what was woven in the place of nodes."""
        woven = [(self._copies.get(node, node), found) for node, found in woven]
        for node, found in woven:
            self._write(node, found)
        for graph in dict.fromkeys(node.graph for node, _ in woven):
            graph.lint()
        for module in self.module.modules():
            if isinstance(module, fx.GraphModule) and woven:
                module.recompile()

    def _write(self, node: fx.Node, woven: Woven) -> None:
        lifted = [self._value(tensor, node) for tensor in woven.lifted]
        args, kwargs = tuple(node.args), dict(node.kwargs)
        self._host.held.append(woven)
        node.op, node.target = "call_function", woven.function()
        row = () if self._row is None else (self._row,)
        node.args, node.kwargs = (args, kwargs, lifted, *row), {}

    def _value(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        """Return the value of a tensor in the graph of a node, to be used there."""
        name, graph = self._name(tensor), node.graph
        if (argument := self._arguments.get(name)) is not None:
            return argument
        call = self.runs.get(graph)
        if call is None:
            if not hasattr(self.module, name):
                add_buffer(self.module, name, tensor)
            with graph.inserting_before(node):
                found: fx.Node = graph.get_attr(name)
        else:
            # Only an argument of the function around may come from outside.
            given: list[fx.Node] = [one for one in graph.nodes if one.op == "placeholder"]
            inputs = {one.target: one for one in given}
            if name in inputs:
                return inputs[name]
            call.args = (*call.args, self._value(tensor, call))
            with graph.inserting_after(given[-1]):
                found = graph.placeholder(name)
        found.meta["example_value"] = self._lifted[id(tensor)][1]
        return found

    def _name(self, tensor: torch.Tensor) -> str:
        return f"_amanda_{list(self._lifted).index(id(tensor))}"


def example(node: fx.Node) -> Any:
    """Return the value of a node in analysis, if it has one."""
    return node.meta.get("example_value")


def is_static(value: Any) -> bool:
    """Return True if the sizes of all tensors are known before a graph runs."""
    return all(
        type(size) is int
        for one in tree_leaves(value)
        if isinstance(one, torch.Tensor)
        for size in one.shape
    )


def is_real(values: Any) -> bool:
    """Return True if there are tensors, and all values are known before a graph runs."""
    found = tree_leaves(values)
    unknown = any(isinstance(value, (FakeTensor, *SYMBOLIC)) for value in found)
    return touches_tensors(found) and not unknown


def touches_tensors(*values: Any) -> bool:
    """Return True if there is a tensor among the values."""
    return any(isinstance(value, torch.Tensor) for value in tree_leaves(values))


def _copied(value: Any, sources: list[torch.Tensor]) -> Any:
    """Return a copy of a fake tensor; add what it is differentiated by to `sources`."""
    if isinstance(value, FakeTensor):
        copied = value.detach().clone()
        if value.requires_grad:
            sources.append(copied.requires_grad_())
            copied = copied.clone()  # The node may write it, which is an error for a leaf.
            # Writing a view makes other autograd nodes.
            return copied.view_as(copied) if is_view(value) else copied
        return copied
    return value


def _differentiable(values: Any) -> list[torch.Tensor]:
    found = tree_leaves(values)
    return [one for one in found if isinstance(one, torch.Tensor) and one.requires_grad]
