"""Matches in a program that is being rewritten, the values inside them, and placeholders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amanda_core.interface.facts import Facts
from amanda_tools.graph.model import Graph, Op
from amanda_tools.kit.tensors.types import type_of
from amanda_tools.kit.tensors.values import UNKNOWN
from amanda_tools.rewriting.patterns import Place, Site
from amanda_tools.rewriting.result import Rewritten
from amanda_tools.rewriting.rules import Rule, Taken

__all__ = ["Inside", "Match", "Role", "flat", "kind_of", "stand_in_like", "value_at", "write"]


class Match:
    """One match, and its state."""

    def __init__(self, rule: Rule, graph: Graph, site: Site) -> None:
        self.rule, self.graph = rule, graph
        #: Whether operators may return placeholders.
        self.is_torch = graph.namespace.startswith("pytorch/")
        names = [op.name for op in site.ops.values()]
        self.report = Rewritten(rule.name, site.tail.name, site.tail.source, names[::-1])
        #: Why it is no longer rewritten, or None.
        self.off: str | None = None
        #: In a graph, the replacement of its first operator.
        self.head: Callable[..., Any] | None = None
        #: The roles of its operators, the last one first.
        self.roles = [Role(self, name, op, site) for name, op in site.ops.items()]

    def refuse(self, reason: str) -> None:
        """Stop rewriting it."""
        self.off = self.report.refused = reason

    def fell_back(self, reason: str) -> None:
        """Count an execution that was not rewritten."""
        self.report.fallbacks[reason] = self.report.fallbacks.get(reason, 0) + 1


class Role:
    """Role of an operator in a match."""

    def __init__(self, match: Match, name: str, op: Op, site: Site) -> None:
        self.match, self.name, self.op = match, name, op
        self.is_tail = op is site.tail
        #: Place of an input -> operator of the match that produces the value.
        self.links: Mapping[Place, int] = site.links.get(op.index, {})
        self.inputs = [
            (input_name, place)
            for input_name, places in site.inputs.items()
            for index, place in places
            if index == op.index
        ]
        self.names: Sequence[str] = ()
        self.attrs: Mapping[str, Any] = {}
        #: The driver's facts about tensors.
        self.facts: Facts = UNKNOWN
        #: In a graph: its constant inputs, and the places of the others, which it passes on.
        self.constants: dict[Place, Any] = {}
        self.carried: list[Place] = []
        #: Types of the inputs -> shape and dtype of the output.
        self.outputs: dict[Any, tuple[tuple[int, ...], Any]] = {}


class Inside:
    """Origin of a value inside a match.

    Attributes:
        deferred: Whether it is a placeholder, for which nothing was computed.
        before: Its previous origin, if an operator returned its input.
        grad: Whether gradients were recorded.
    """

    def __init__(self, role: Role, taken: Taken, deferred: bool) -> None:
        self.role, self.taken, self.deferred = role, taken, deferred
        self.ref: Callable[[], Any] = lambda: None
        self.before: Inside | None = None
        self.grad = deferred and _records_gradients()


def _records_gradients() -> bool:
    import torch

    return torch.is_grad_enabled()


def value_at(inputs: Sequence[Any], place: Place) -> Any:
    """Return the value at a place of an operator's inputs."""
    return inputs[place[0]][place[1]] if isinstance(place, tuple) else inputs[place]


def flat(values: Sequence[Any]) -> list[Any]:
    """Flatten lists among the values."""
    found: list[Any] = []
    for value in values:
        found += value if isinstance(value, (list, tuple)) else [value]
    return found


def kind_of(facts: Facts, inputs: Sequence[Any]) -> Any:
    """Return a key that determines the shape of an operator's output."""
    return tuple(type_of(facts, value) or repr(value) for value in flat(inputs))


def stand_in_like(facts: Facts, inputs: Sequence[Any], like: tuple[tuple[int, ...], Any]) -> Any:
    """Return a placeholder with the shape and dtype of an output, all NaN and with no memory of its
    own.

    Args:
        facts: The driver's facts about tensors.
        inputs: Inputs of the operator.
        like: Shape and dtype.

    Returns:
        A PyTorch tensor, or None if a placeholder is not possible, as for integers.
    """
    shape, dtype = like
    first = next(filter(facts.is_tensor, flat(inputs)), None)
    if first is None or not dtype.is_floating_point:
        return None
    one = first.new_full((1,), float("nan"), dtype=dtype)
    return first.new_empty(0, dtype=dtype).set_(one.untyped_storage(), 0, shape, (0,) * len(shape))


def write(stand_in: Any, compute: Callable[[], Any], grad: bool) -> None:
    """Write the output of an operator into its placeholder, with its gradients if `grad`."""
    import torch

    with torch.no_grad():
        own = stand_in.new_empty(stand_in.shape)
        stand_in.set_(own.untyped_storage(), 0, own.shape, own.stride())
    with torch.set_grad_enabled(grad):
        stand_in.copy_(compute())
