"""What a program returns, as the scores of a classifier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from amanda_core.errors import ToolError
from amanda_core.interface.facts import Facts
from amanda_tools.kit.tensors.values import host, numbers

__all__ = ["scores_of"]


def scores_of(outputs: Any, known: Iterable[Facts], where: str, like: Any = None) -> Any:
    """Return the outputs of a program as a float64 array.

    Args:
        outputs: A tensor, or something that NumPy converts.
        known: The facts of the frameworks that the program uses.
        where: Who asks, for errors.
        like: An array of the shape that the outputs must have.

    Raises:
        ToolError: They are not an array of at least one score, or have another shape.
    """
    import numpy

    kind = type(outputs).__name__
    for facts in known:
        if facts.is_tensor(outputs):
            tensor = host(facts, outputs)
            outputs = numbers(tensor.array, tensor.dtype)
            break
    try:
        array = numpy.asarray(outputs).astype(numpy.float64)
    except (TypeError, ValueError, RuntimeError):
        array = numpy.zeros(())
    if not array.ndim or not array.size:
        raise ToolError(
            f"The program returns {kind}, not the scores of classes",
            where=where,
            fix="Return an array or a tensor of shape (samples, classes)",
        )
    if like is not None and array.shape != like.shape:
        raise ToolError(
            f"The outputs have shape {array.shape}, and unchanged {like.shape}",
            where=where,
            fix="Use the same samples in each run",
        )
    return array
