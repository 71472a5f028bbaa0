"""Mistakes that a port may have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

__all__ = ["At", "Plant", "draw", "main"]

#: Runs a network once.
Run = Callable[[], object]


@dataclass(frozen=True)
class Plant:
    """A mistake in a port.

    Attributes:
        kind: What is wrong.
        layer: Module of the original, in whose counterpart it is.
        also: Further modules that may be named: those in which the mistake is seen as well.
    """

    kind: str
    layer: str
    also: tuple[str, ...] = ()


class At:
    """Tells a port whether it has a mistake somewhere."""

    def __init__(self, plant: Plant | None = None) -> None:
        self.plant = plant

    def __call__(self, kind: str, layer: str) -> bool:
        """Return True if the mistake is of this kind, in this layer."""
        plant = self.plant
        return plant is not None and (plant.kind, plant.layer) == (kind, layer)


def draw(*shape: int, seed: int = 0) -> numpy.ndarray:
    """Return normally distributed numbers."""
    return numpy.random.default_rng(seed).normal(size=shape).astype(numpy.float32)


def main(plants: Sequence[Plant], ours: Callable[[], Run], port: Callable[[At], Run]) -> None:
    """Run the original or the port, as the command line says."""
    side, *rest = sys.argv[1:]
    if side == "ours":
        ours()()
        return
    chosen = next((one for one in plants if [one.kind, one.layer] == rest), None)
    if rest and chosen is None:
        raise SystemExit(f"No such mistake: {rest}")
    port(At(chosen))()
