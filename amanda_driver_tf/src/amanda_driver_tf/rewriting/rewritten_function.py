"""`RewrittenFunction`: a rewritten function, with the rewritten functions that it calls."""

from __future__ import annotations

from typing import Any

from amanda_driver_tf.graphs.body import Body, Node, Value
from amanda_driver_tf.insertion.body_edits import BodyEdits
from amanda_driver_tf.insertion.nodes import Argument, Host, Mark
from amanda_driver_tf.rewriting.body_rewriting import BodyRewriter

__all__ = ["RewrittenFunction"]


class RewrittenFunction:
    """A body into which the plans of its ops were inserted, not yet written.

    Attributes:
        name: Name of the original function.
        body: The body.
        rewriter: The rewriter of the body.
        arguments: New arguments.
        demands: For each new argument, the value of the forward body that must be passed.
        results: New results.
        calls: Nodes that call functions, each with the rewritten functions.
    """

    def __init__(self, name: str, body: Body) -> None:
        self.name = name
        self.body = body
        self.rewriter: BodyRewriter
        self.arguments: list[Argument] = []
        self.demands: list[Value] = []
        self.results: list[Value] = []
        self.calls: dict[int, tuple[Node, list[RewrittenFunction | None]]] = {}
        #: Value -> its index among the outputs of the node that calls the function.
        self.exported: dict[Value, int] = {}

    @property
    def edits(self) -> BodyEdits:
        """The changes made to the body so far."""
        return self.rewriter.edits

    def functions_of(self, op: Any) -> list[RewrittenFunction | None]:
        """Return the rewritten functions that an op of this body calls."""
        found = self.calls.get(id(op))
        return found[1] if found is not None else []

    def runs_python(self) -> bool:
        """Return True if a host routine or a mark is in this function or in one that it calls."""
        inner = (function for _, functions in self.calls.values() for function in functions)
        return any(isinstance(node, (Host, Mark)) for node in self.edits.new) or any(
            function.runs_python() for function in inner if function is not None
        )

    def has_new_gradients(self) -> bool:
        """Return True if new nodes compute gradients, here or in a function that it calls."""
        inner = (function for _, functions in self.calls.values() for function in functions)
        return self.rewriter.has_new_gradients() or any(
            function.has_new_gradients() for function in inner if function is not None
        )

    def is_edited(self) -> bool:
        """Return True if anything inserted here, or in a function that it calls, may change a
        value.
        """
        inner = (function for _, functions in self.calls.values() for function in functions)
        return (
            self.edits.edited
            or bool(self.arguments)
            or any(function.is_edited() for function in inner if function is not None)
        )
