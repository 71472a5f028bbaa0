"""`WeightCoverage`: how much of a model's parameters a tool that changes weights has reached.

Owns the counting, and how a result says it. Each such tool decides itself what reaching means.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from amanda_core import Tool
from amanda_core.weights.geometry import Region
from amanda_core.weights.reads import Reads, Weight
from amanda_tools.kit.output.rendering import format_percent

__all__ = ["UnreachedWeight", "WeightCoverage", "describe_coverage", "elements_in", "list_weights"]

#: How many of the unreached parameters a title names; the result has all of them.
_NAMED = 4


@dataclass
class UnreachedWeight:
    """Elements of a parameter that a tool did not change where they were read.

    Attributes:
        name: Its name in the model.
        elements: How many of its elements were not changed.
        reason: Why they were not.

    >>> list_weights("not pruned", [UnreachedWeight("head.weight", 640, "an embedding")])
    ['not pruned: head.weight (640, an embedding)']
    """

    name: str
    elements: int
    reason: str


class WeightCoverage:
    """Records which parameters there are, and how much of each was changed where it was read.

    In an analysis routine::

        self.coverage.add_parameters(context.weights, context.zone, context.name)
        for weight in context.weights.values():
            self.coverage.add_reached(weight)

    Args:
        tool: The tool. What it was not shown reads weights unchanged.

    >>> WeightCoverage(Tool()).figures()
    (0, 0, [])
    """

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._shapes: dict[str, tuple[int, ...]] = {}
        #: Owner -> how many axes the parts have that operators read, at most.
        self._ranks: dict[str, int] = {}
        #: Models whose parameters are known.
        self._roots: set[str] = {""}
        #: Owner -> regions that were changed.
        self._regions: dict[str, dict[str, Region]] = {}
        #: Owner -> parts that indices cannot express, and how many elements each has.
        self._parts: dict[str, dict[object, int]] = {}
        #: Owner -> reasons why it was not changed where it was read.
        self._reasons: dict[str, dict[str, None]] = {}
        #: Owner -> the last product that reads what is computed from it, such as a merged update.
        self._computed: dict[str, str] = {}
        #: Owners that an optimizer reads. What nothing else reads is a state of its own.
        self._in_optimizer: set[str] = set()

    def add_parameters(self, reads: Reads, zone: str, op: str = "an operator") -> None:
        """Record the parameters of the running model if it, or one of those read, is new.

        Args:
            reads: The weights that an operator reads.
            zone: The operator's zone.
            op: The operator's readable name.
        """
        self._computed.update(dict.fromkeys(reads.computed, op))
        if zone == "optimizer":
            self._in_optimizer.update(weight.owner for weight in reads.values())
        for weight in reads.values() if reads.consumed else ():
            rank = len(weight.shape) - sum(isinstance(index, int) for index in weight.region)
            self._ranks[weight.owner] = max(rank, self._ranks.get(weight.owner, 0))
        if reads.root not in self._roots or any(
            weight.owner not in self._shapes for weight in reads.values()
        ):
            self._roots.add(reads.root)
            self._shapes.update(reads.shapes())

    def add_reached(self, weight: Weight) -> None:
        """Record that a part of a parameter is changed where it is read."""
        owner, seen = weight.owner, weight.seen
        self._shapes[owner] = weight.shape
        if weight.exact or seen is None:
            self._regions.setdefault(owner, {})[weight.key] = weight.region
        else:
            # Broadcast axes show the same elements again.
            sizes = [n for n, step in zip(seen.shape, seen.strides, strict=True) if step]
            self._parts.setdefault(owner, {})[seen] = math.prod(sizes)

    def add_unreached(self, weight: Weight, reason: str) -> None:
        """Record why a parameter is not changed where it is read."""
        self._shapes.setdefault(weight.owner, weight.shape)
        self._reasons.setdefault(weight.owner, {})[reason] = None

    def add_unchanged(self, owner: str, reason: str) -> None:
        """Record that a parameter was not changed after all where it was read."""
        self._regions.pop(owner, None)
        self._parts.pop(owner, None)
        self._reasons.setdefault(owner, {})[reason] = None

    def read(self, owner: str) -> int:
        """Return how many elements of a parameter were changed where they were read."""
        if (shape := self._shapes.get(owner)) is None:
            return 0
        exact = elements_in([*self._regions.get(owner, {}).values()], shape)
        return min(exact + sum(self._parts.get(owner, {}).values()), math.prod(shape))

    def unread_matrices(self) -> list[str]:
        """Return the names of single matrices, such as those of experts, that were never read,
        where others of the same parameter were.
        """
        names = []
        for owner, regions in self._regions.items():
            # A list, since slices can be hashed only from Python 3.12 on.
            shape, first = self._shapes[owner], [r[0] if r else None for r in regions.values()]
            if len(shape) > 2 and all(isinstance(index, int) for index in first):
                name = owner.partition(":")[2]
                names += [f"{name}[{i}]" for i in sorted({*range(shape[0])} - {*first})]
        return names

    def figures(self, otherwise: str | None = None) -> tuple[int, int, list[UnreachedWeight]]:
        """Return how many elements all matrices have, how many are reached, and the unreached.

        Args:
            otherwise: The reason for parameters of which `add_unreached` has recorded none. None
                for one that says whether the user restricted the tool.
        """
        if otherwise is None:
            restricted = self._tool.is_restricted
            otherwise = "read by no selected operator" if restricted else "not read"
        total = reached = 0
        unreached = []
        unseen = self._add_unseen()
        for owner, shape in self._shapes.items():
            if min(len(shape), self._ranks.get(owner, len(shape))) < 2:
                continue  # Vectors, which may be stacked.
            elements, read = math.prod(shape), 0 if owner in unseen else self.read(owner)
            if owner in self._in_optimizer and not read and owner not in self._reasons:
                continue
            total, reached = total + elements, reached + read
            if read < elements:
                reasons = list(self._reasons.get(owner, ()))
                if owner in self._computed:
                    reasons.append(f"{self._computed[owner]} reads what is computed from it")
                reasons = reasons or [otherwise]
                name = owner.partition(":")[2]
                unreached.append(UnreachedWeight(name, elements - read, "; ".join(reasons)))
        return total, reached, unreached

    def _add_unseen(self) -> Collection[str]:
        """Add the parameters that the tool was not shown, and return them."""
        unseen = self._tool.weights_not_seen()
        for owner, (shape, reason) in unseen.items():
            self._shapes.setdefault(owner, shape)
            self._reasons.setdefault(owner, {})[reason] = None
        return unseen

    def read_otherwise(self) -> list[UnreachedWeight]:
        """Return the matrices that were changed where they were read, but not everywhere.

        Their `elements` are those that were changed at some place.
        """
        self._add_unseen()
        return [
            UnreachedWeight(owner.partition(":")[2], read, "; ".join(reasons))
            for owner, reasons in self._reasons.items()
            if len(self._shapes.get(owner, ())) > 1 and (read := self.read(owner))
        ]


def describe_coverage(
    parameters: int, reached: int, unreached: Sequence[UnreachedWeight]
) -> list[str]:
    """Return phrases of a title about the figures of a `WeightCoverage`."""
    parts = []
    if parameters:
        parts.append(f"{format_percent(reached, parameters)} of the parameters reached")
    return parts + list_weights("not reached", unreached)


def list_weights(heading: str, weights: Sequence[UnreachedWeight]) -> list[str]:
    """Return a phrase of a title that lists weights, or nothing if there are none."""
    names = [f"{one.name} ({one.elements}, {one.reason})" for one in weights[:_NAMED]]
    more = len(weights) - len(names)
    return [f"{heading}: {', '.join(names)}{f' and {more} more' * bool(more)}"] if names else []


def elements_in(regions: Collection[Region], shape: tuple[int, ...]) -> int:
    """Return how many elements of a tensor lie in at least one of the regions.

    >>> elements_in([(0,), (slice(0, 2), 3), (3, slice(0, 2))], (4, 5))
    8
    """
    if not regions:
        return 0
    if () in regions:
        return math.prod(shape)
    size, *rest = shape
    spans = [(_indices(index, size), tuple(others)) for index, *others in regions]
    # Indices that the same regions contain have the same rest.
    groups: dict[tuple[int, ...], int] = {}
    for index in range(size):
        inside = tuple(number for number, (span, _) in enumerate(spans) if index in span)
        groups[inside] = groups.get(inside, 0) + 1
    return sum(
        count * elements_in([spans[number][1] for number in inside], tuple(rest))
        for inside, count in groups.items()
    )


def _indices(index: int | slice, size: int) -> range:
    return range(index, index + 1) if isinstance(index, int) else range(*index.indices(size))
