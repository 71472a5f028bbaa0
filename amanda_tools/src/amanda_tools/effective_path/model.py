"""What effective paths are extracted of, how, and what is found of each operator.

Owns the data between the tool, the walk and the rules.
"""

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
#: Kinds of nodes that have a weight.
WEIGHTED = frozenset({"linear", "conv"})


@dataclass
class Node:
    """One operator, as the extraction sees it.

    Attributes:
        name: Readable name, which is its own.
        kind: What `rules` has a rule for, such as ``conv``.
        inputs: Numbers of the values that it is computed from.
        output: Number of the value that it computes.
        arguments: What its rule needs besides the values.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    output: int
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Unsuited(Exception):
    """Paths do not go through an operator that is called like this; the message says why."""


@dataclass(frozen=True)
class LayerRule:
    """How paths go through an operator.

    Attributes:
        kind: A kind of `Node`; ``shift`` and ``scale`` for what adds or multiplies by
            what does not depend on the input of the network.
        operands: Positions of the inputs that paths go on to.
        arguments: Gives what the kind's rule needs, of the inputs by name, the attributes among
            them, the arrays of the operands, and the array of the output.
        weight: Position of the weight, which is no operand.
    """

    kind: str
    operands: tuple[int, ...] = (0,)
    arguments: Callable[[Mapping[str, Any], Sequence[Any], Any], dict[str, Any]] = (
        lambda given, operands, output: {}
    )
    weight: int | None = None


@dataclass
class PathEnd:
    """A value that paths come to and that they do not go on from.

    Attributes:
        name: Readable name of what made it.
        type: Its word, or the backend's name for it.
        reason: Why paths end there.
        lost: Whether something in front of it may belong to the paths: a layer, or what cannot be
            looked into. Else the value counts as the network's input.
        runs: In how many runs a path came to it.
    """

    name: str
    type: str
    reason: str
    lost: bool = True
    runs: int = 0

    @property
    def consequence(self) -> str:
        """What that means for the paths."""
        if self.lost:
            return "what is inside of it and in front of it is missing in the paths"
        return "its value counts as the input; no layer is in front of it"


@dataclass
class Extraction:
    """How a path is extracted.

    Attributes:
        variant: ``cumulative`` begins at the predicted class and keeps of each sum the largest
            terms that make up `theta` of it. ``BwCU`` begins at all outputs of an absolute value
            above the last layer's threshold. ``BwAB`` begins there, too, and keeps of a layer's
            sums the terms of at least a threshold. ``FwAB`` does that in each layer for itself, at
            all outputs of an absolute value above its threshold.
        theta: Share of a sum that is kept.
        output_threshold: Name of a layer -> threshold of its outputs.
        term_threshold: Name of a layer -> threshold of the terms of its sums.
        zeros: Whether an output of a maximum pooling that is not positive has inputs.
    """

    variant: Variant = "cumulative"
    theta: float = 0.5
    output_threshold: Callable[[str], float] = lambda name: 0.0
    term_threshold: Callable[[str], float] = lambda name: 0.0
    zeros: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.theta <= 1:
            raise ValueError(f"theta must be above 0 and at most 1, and is {self.theta}")
        if self.variant not in get_args(Variant):
            choices = ", ".join(get_args(Variant))
            raise ValueError(f"variant must be one of {choices}, and is {self.variant!r}")


@dataclass
class Layer:
    """What a path takes of one operator, in all samples of a batch.

    Indices are those of the flattened arrays, as they are laid out.

    Attributes:
        points: Value -> truth values, which of its elements the operator takes.
        edges: For each edge, the number of the input, the index in it, and the index in the output.
        weights: For each edge that has one, the number of the sample and the index of the weight,
            each pair once; of shape (pairs, 2).
        output_threshold: For each sample, the least absolute value of as many largest outputs as
            are in the path.
        term_threshold: For each sample, the mean of the least term that is kept of each output.
        possible: Number of edges that the operator has in one sample, those of padding included.
    """

    points: dict[int, Any]
    edges: Any
    possible: int = 0
    weights: Any = None
    output_threshold: Any = None
    term_threshold: Any = None
