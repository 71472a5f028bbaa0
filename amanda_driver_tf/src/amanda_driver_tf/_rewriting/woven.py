"""`Woven`: a function with the plans of its ops in it, and the functions that it calls likewise."""

from __future__ import annotations

from typing import Any

from amanda_driver_tf._graphs.body import Body, Node, Value
from amanda_driver_tf._insertion.body_edits import BodyEdits
from amanda_driver_tf._insertion.nodes import Argument, Host
from amanda_driver_tf._rewriting.body_rewriting import Weaver

__all__ = ["Woven"]


class Woven:
    """A body with the plans of its ops in it, not yet written down.

    Attributes:
        name: Name of the function that it was made from.
        body: The body.
        weaver: Its weaver.
        arguments: New arguments.
        demands: For each of them the value of the forward body that it is to be.
        results: New results.
        calls: Nodes that run functions, each with these.
    """

    def __init__(self, name: str, body: Body) -> None:
        self.name = name
        self.body = body
        self.weaver: Weaver
        self.arguments: list[Argument] = []
        self.demands: list[Value] = []
        self.results: list[Value] = []
        self.calls: dict[int, tuple[Node, list[Woven | None]]] = {}
        #: Value -> its index among the outputs of the node that runs the function.
        self.led_out: dict[Value, int] = {}

    @property
    def edits(self) -> BodyEdits:
        """What was changed in the body so far."""
        return self.weaver.edits

    def functions_of(self, op: Any) -> list[Woven | None]:
        """The woven functions that an op of this body runs."""
        found = self.calls.get(id(op))
        return found[1] if found is not None else []

    def runs_python(self) -> bool:
        """Return True if a routine runs as Python in it or in what it runs."""
        inner = (function for _, functions in self.calls.values() for function in functions)
        return any(isinstance(node, Host) for node in self.edits.new) or any(
            function.runs_python() for function in inner if function is not None
        )

    def has_new_gradients(self) -> bool:
        """Return True if it, or what it runs, has gradients that TensorFlow did not make."""
        inner = (function for _, functions in self.calls.values() for function in functions)
        return self.weaver.has_new_gradients() or any(
            function.has_new_gradients() for function in inner if function is not None
        )

    def is_edited(self) -> bool:
        """Return True if what was inserted, here or in what it runs, may change a value."""
        inner = (function for _, functions in self.calls.values() for function in functions)
        return (
            self.edits.edited
            or bool(self.arguments)
            or any(function.is_edited() for function in inner if function is not None)
        )
