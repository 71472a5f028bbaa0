"""Layers and members of ensembles whose parameters are stacked.

The body of a scan over layers is traced once, and so is a function that is mapped over members. So
its operators would stand for those of all of them. While tools are applied such a scan or map is
the loop that it stands for: each layer or member has ops and weights of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

from amanda_driver_jax import jax_internals as internals
from amanda_driver_jax.arrays import layer
from amanda_driver_jax.trace_keys import LOCAL, PLAIN

__all__ = ["MEMBERS", "run_layers", "run_members"]

#: How many members of an ensemble run one after the other at most: a program grows with each.
MEMBERS = 64


class _Loop:
    """One execution of a loop, in which the occurrences of ops are counted.

    Args:
        frame: The frame that runs it.

    Attributes:
        trace: The transformation around it.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame, self.trace = frame, internals.current_trace()

    def has(self, call: FrameType | None) -> bool:
        """Return True if a call of a model is inside the loop."""
        while call is not None and call is not self._frame:
            call = call.f_back
        return call is self._frame


@contextmanager
def _loop(numbers: Iterable[int], repeat: Callable[[], None]) -> Iterator[Iterator[int]]:
    before = LOCAL.loop, LOCAL.uncompiled
    # Inside another loop occurrences are counted in that.
    LOCAL.loop = LOCAL.loop or _Loop(sys._getframe(3))
    # A compiled program of a jitted function would be that of all iterations.
    LOCAL.uncompiled |= internals.is_top_level()

    def iterations() -> Iterator[int]:
        for number in numbers:
            repeat()
            yield number

    try:
        yield iterations()
    finally:
        LOCAL.loop, LOCAL.uncompiled = before


def run_layers(
    function: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    stacked: Any,
    backwards: bool,
    repeat: Callable[[], None],
) -> tuple[Any, Any]:
    """Call a function for each layer, and return what `jax.lax.scan` returns.

    Args:
        function: Gets what the layer before has returned, and the parameters of a layer.
        carry: What the first layer gets.
        stacked: The parameters; each leaf has the layers along its first axis.
        backwards: Call the last layer first.
        repeat: Called before each layer: a scan calls the function once for all of them.
    """
    leaves, tree = jax.tree.flatten(stacked)
    count = len(leaves[0])
    with PLAIN:
        carry = jax.tree.map(jnp.asarray, carry)
    results = [None] * count
    with _loop(reversed(range(count)) if backwards else range(count), repeat) as numbers:
        for index in numbers:
            parameters = tree.unflatten([layer(leaf, index) for leaf in leaves])
            carry, results[index] = function(carry, parameters)
    with PLAIN:
        return carry, jax.tree.map(lambda *values: jnp.stack(values), *results)


def run_members(
    function: Callable[..., Sequence[Any]],
    values: Sequence[Any],
    axes: Sequence[int | None],
    results: Callable[[], Sequence[Any]],
    count: int,
    repeat: Callable[[], None],
) -> tuple[list[Any], list[Any]]:
    """Call a function for each member, and return what `jax.vmap` does with its results.

    Args:
        function: Gets the values of a member.
        values: Those of all members.
        axes: The axis of each value along which the members are; None if all get the same.
        results: Returns the same for the results, after a call.
        count: How many members there are.
        repeat: Called before each member, as for `run_layers`.
    """
    found = []
    with _loop(range(count), repeat) as numbers:
        for index in numbers:
            pairs = zip(values, axes, strict=True)
            found.append(
                function(*[v if axis is None else layer(v, index, axis) for v, axis in pairs])
            )
    # What JAX would infer is at the front.
    places = [place if place is None or isinstance(place, int) else 0 for place in results()]
    with PLAIN:
        stacks = [
            members[0] if place is None else jnp.stack([*map(jnp.asarray, members)], place)
            for place, members in zip(places, zip(*found, strict=True), strict=True)
        ]
    return stacks, places
