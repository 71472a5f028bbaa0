"""Derivatives of routines, computed by a tape inside the new node.

Owns the functions that compute them, and the error for gradients that TensorFlow would drop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from amanda_core.driver_kit import Step
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.insertion.nodes import Flat
from amanda_driver_tf.tensorflow_internals import tapes

__all__ = ["NO_PLACE", "lost_gradient_error", "refuse_gradients", "vector_jacobian"]

#: The advice where the gradient of a replacement would be lost.
NO_PLACE = "Run it eagerly, where tapes ask the tools first"


def lost_gradient_error(position: int, step: Step) -> UnsupportedError:
    """Return the error for a gradient of an input that TensorFlow does not propagate."""
    return UnsupportedError(
        f"There is a gradient for input {position}, but TensorFlow propagates none to it in "
        "graphs, so it would be lost",
        where=step.where,
        fix=f"Leave that gradient out. {NO_PLACE}",
    )


def vector_jacobian(forward: Flat, inputs: int, step: Step, absent: Sequence[int]) -> Flat:
    """Return the gradient function of `forward`: ``[*inputs, *gradients] -> gradients of inputs``.

    Args:
        forward: The function; it runs again here, on a tape.
        inputs: How many inputs it has.
        step: The step it computes.
        absent: Inputs that must have no gradient, since nothing would read it.
    """

    def run(flat: list[Any]) -> list[Any]:
        values, gradients = flat[:inputs], flat[inputs:]
        with _recording():
            with tf.GradientTape(persistent=bool(absent)) as tape:
                tape.watch(values)
                outputs = forward(values)
            for output, gradient in zip(outputs, gradients, strict=True):
                if output.shape != gradient.shape:
                    raise UnsupportedError(
                        f"A routine returned a tensor of shape {output.shape}, but its gradient "
                        f"is built for {gradient.shape}",
                        where=step.where,
                        fix="Return a tensor of the same shape",
                    )
            for index in absent:
                if tape.gradient(outputs, values[index], gradients) is not None:
                    raise lost_gradient_error(index, step)
            found = tape.gradient(
                outputs, values, gradients, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
        return [tf.convert_to_tensor(gradient) for gradient in found]

    return run


def refuse_gradients(flat: Flat, inputs: Sequence[int], step: Step) -> Flat:
    """Wrap a function so that it raises if any of `inputs` has a gradient."""

    def run(values: list[Any]) -> list[Any]:
        watched = [values[index] for index in inputs]
        with _recording(), tf.GradientTape() as tape:
            tape.watch(watched)
            outputs = flat(values)
        for index, gradient in zip(inputs, tape.gradient(outputs, watched), strict=True):
            if gradient is not None:
                raise lost_gradient_error(index, step)
        return outputs

    return run


@contextmanager
def _recording() -> Iterator[None]:
    # TensorFlow stops the thread's tapes during the function call that this node runs in.
    stopped = tapes.tapes_stopped()
    if stopped:
        tapes.restart_tapes()
    try:
        yield
    finally:
        if stopped:
            tapes.stop_tapes()
