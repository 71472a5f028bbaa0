"""Data model of effective paths: nodes, layer rules, extraction options, and results per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

__all__ = [
    "WEIGHTED",
    "Extraction",
    "Layer",
    "LayerRule",
    "Node",
    "PathEnd",
    "Unsuited",
    "Variant",
]

Variant = Literal["cumulative", "BwCU", "BwAB", "FwAB"]
#: Kinds of nodes with a weight.
WEIGHTED = frozenset({"linear", "conv"})


@dataclass
class Node:
    """One operator, as the extraction sees it.

    Attributes:
        name: Readable, unique name.
        kind: Key of its rule in `rules`, such as ``conv``.
        inputs: Numbers of the values from which it is computed.
        output: Number of the value that it computes.
        arguments: What its rule needs in addition to the values.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    output: int
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Unsuited(Exception):
    """Raised if paths do not go through an operator called like this; the message says why."""


@dataclass(frozen=True)
class LayerRule:
    """The rule by which paths pass through an operator.

    Attributes:
        kind: Kind of the `Node`; also ``shift`` and ``scale`` for an operator that adds or
            multiplies by a value that does not depend on the network's input.
        operands: Positions of the inputs through which paths continue.
        arguments: Returns what the rule of the kind needs, given the inputs and attributes by name,
            the arrays of the operands, and the array of the output.
        weight: Position of the weight, which is not an operand.
        is_view: Whether it only changes the shape, so that it may merge the axis of samples with
            the next one, or split it again.
    """

    kind: str
    operands: tuple[int, ...] = (0,)
    arguments: Callable[[Mapping[str, Any], Sequence[Any], Any], dict[str, Any]] = (
        lambda given, operands, output: {}
    )
    weight: int | None = None
    is_view: bool = False


@dataclass
class PathEnd:
    """A value at which paths end.

    Attributes:
        name: Readable name of its producer.
        type: Common type of the producer, or the framework's.
        reason: Why paths end there.
        lost: Whether something before it may belong to the paths: a layer, or a call that cannot be
            followed. Otherwise the value counts as the network's input.
        runs: Number of runs in which a path reached it.
    """

    name: str
    type: str
    reason: str
    lost: bool = True
    runs: int = 0

    @property
    def consequence(self) -> str:
        """Return a sentence that says what this means for the paths."""
        if self.lost:
            return "what is inside and before it is missing from the paths"
        return "its value counts as the input; there is no layer before it"


@dataclass
class Extraction:
    """Options of the extraction.

    Attributes:
        variant: ``cumulative`` starts at the predicted class and keeps the largest terms of each
            sum that make up `theta` of it. ``BwCU`` starts at all outputs with an absolute value
            above the last layer's threshold. ``BwAB`` starts there, too, and keeps the terms of
            each sum that reach a threshold. ``FwAB`` does the same in each layer separately, for
            all outputs with an absolute value above its threshold.
        theta: Share of a sum that is kept.
        output_threshold: Name of a layer -> threshold of its outputs.
        term_threshold: Name of a layer -> threshold of the terms of its sums.
        zeros: Whether a maximum pooling's output that is not positive has inputs.
        start: Position of the token at which paths start, where the output has three axes.
    """

    variant: Variant = "cumulative"
    theta: float = 0.5
    output_threshold: Callable[[str], float] = lambda name: 0.0
    term_threshold: Callable[[str], float] = lambda name: 0.0
    zeros: bool = False
    start: int = -1

    def __post_init__(self) -> None:
        if not 0 < self.theta <= 1:
            raise ValueError(f"theta must be above 0 and at most 1, but is {self.theta}")
        if self.variant not in get_args(Variant):
            choices = ", ".join(get_args(Variant))
            raise ValueError(f"variant must be one of {choices}, but is {self.variant!r}")


@dataclass
class Layer:
    """Part of one operator that belongs to the paths of a batch.

    Indices refer to the flattened arrays in their memory layout.

    Attributes:
        points: Value -> booleans for the elements that the operator takes.
        edges: Three arrays with, for each edge, the number of the input, the index in it, and the
            index in the output.
        weights: Pairs of a sample and the index of a weight, without duplicates; of shape (pairs,
            2).
        output_threshold: For each sample, the threshold of absolute values that selects as many
            outputs as are in the path.
        term_threshold: For each sample, the mean over the outputs of the least term that is kept.
        possible: Number of edges of the operator in one sample, including those of padding.
    """

    points: dict[int, Any]
    edges: Any
    possible: int = 0
    weights: Any = None
    output_threshold: Any = None
    term_threshold: Any = None
