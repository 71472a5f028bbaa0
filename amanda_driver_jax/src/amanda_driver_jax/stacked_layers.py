"""Layers whose parameters are stacked, and over which a program scans.

A scan's body is traced once, so its operators would stand for those of all layers. While tools are
applied such a scan is the loop that it stands for: each layer has ops and weights of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

from amanda_driver_jax.arrays import layer
from amanda_driver_jax.trace_keys import LOCAL, PLAIN

__all__ = ["run_layers"]


class _Loop:
    """One execution of a loop, in which the occurrences of ops are counted.

    Args:
        frame: The frame that runs it.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame

    def has(self, call: FrameType | None) -> bool:
        """Return True if a call of a model is inside the loop."""
        while call is not None and call is not self._frame:
            call = call.f_back
        return call is self._frame


def run_layers(
    function: Callable[[Any, Any], tuple[Any, Any]], carry: Any, stacked: Any, backwards: bool
) -> tuple[Any, Any]:
    """Call a function for each layer, and return what `jax.lax.scan` returns.

    Args:
        function: Gets what the layer before has returned, and the parameters of a layer.
        carry: What the first layer gets.
        stacked: The parameters; each leaf has the layers along its first axis.
        backwards: Call the last layer first.
    """
    leaves, tree = jax.tree.flatten(stacked)
    count = len(leaves[0])
    with PLAIN:
        carry = jax.tree.map(jnp.asarray, carry)
    results = [None] * count
    before, LOCAL.loop = LOCAL.loop, _Loop(sys._getframe())
    try:
        for index in reversed(range(count)) if backwards else range(count):
            parameters = tree.unflatten([layer(leaf, index) for leaf in leaves])
            carry, results[index] = function(carry, parameters)
    finally:
        LOCAL.loop = before
    with PLAIN:
        return carry, jax.tree.map(lambda *values: jnp.stack(values), *results)
