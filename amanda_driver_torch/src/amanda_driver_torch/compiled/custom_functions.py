"""Calls of an `autograd.Function` in a graph, as the operator that `apply` is in eager mode.

Dynamo traces its forward and backward as two graphs, which get the tensors that they read in an
order of their own. Owns how positions of `apply` belong to these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx

from amanda_driver_torch.compiled.call_sites import called_of
from amanda_driver_torch.compiled.choice import CannotWeave
from amanda_driver_torch.operators.operator import Operator

__all__ = ["CustomCall"]


class CustomCall(NamedTuple):
    """One call in a graph.

    Attributes:
        operator: The function as an operator.
        run: Runs it on the arguments of `apply`.
        args: These arguments: nodes, and constants.
    """

    operator: Operator
    run: Callable[..., Any]
    args: tuple[Any, ...]

    @classmethod
    def of(cls, node: fx.Node, watches_backward: bool) -> CustomCall:
        """Return the call that a node of a graph is.

        Args:
            node: The node.
            watches_backward: Whether a tool analyses its backward operator.

        Raises:
            CannotWeave: Its arguments are not known, or it is another operator than in eager mode.
        """
        called = called_of(node)
        if called.function is None:
            raise CannotWeave(f"the graph has the higher-order operator {node.target}")
        function, args = called.function
        name, read = function.__name__, node.args[2:]
        named: Any = node.args[:2]
        bodies = [getattr(node.graph.owning_module, one.target) for one in named]
        if args is None or any(args.count(one) != 1 for one in read):
            raise CannotWeave(f"the function {name} reads tensors other than its arguments")
        if node.kwargs.get("dirty_idx"):
            raise CannotWeave(f"the function {name} writes its arguments")
        if any(called_of(one).modules.keys() - called.modules for one in bodies[0].graph.nodes):
            raise CannotWeave(f"the function {name} calls modules")
        hop: Any = node.target
        positions, given = [args.index(one) for one in read], dict(node.kwargs)
        if watches_backward and positions != sorted(positions):
            raise CannotWeave(f"the backward of the function {name} has another order of gradients")

        def run(*values: Any) -> Any:
            return hop(*bodies, *(values[position] for position in positions), **given)

        run.__name__ = name
        return cls(Operator(function, function, name), run, args)
