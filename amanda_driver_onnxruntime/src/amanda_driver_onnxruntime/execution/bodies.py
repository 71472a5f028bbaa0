"""If, Loop and Scan as ONNX defines them: the operators inside are operators of the program.

Owns how often a body runs, and on what. It does not know how a body runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from amanda_driver_onnxruntime.graphs import Graph, Node
from amanda_driver_onnxruntime.onnxruntime_internals.values import array_of

__all__ = ["interpreter_of"]

#: Runs a graph on its inputs, and returns its outputs.
RunBody = Callable[[Graph, Sequence[Any]], list[Any]]
#: Runs a node on its inputs by its bodies; None if only ONNX Runtime can run it on these.
Interpreter = Callable[[Node, Sequence[Any], RunBody], list[Any] | None]


def interpreter_of(node: Node) -> Interpreter | None:
    """Return the function that runs an If, a Loop or a Scan; None for other nodes."""
    return _INTERPRETERS[node.operator.__name__] if node.is_open else None


def _branch(node: Node, inputs: Sequence[Any], run: RunBody) -> list[Any]:
    taken = bool(numpy.asarray(inputs[0]).reshape(-1)[0])
    return run(node.bodies["then_branch" if taken else "else_branch"], ())


def _loop(node: Node, inputs: Sequence[Any], run: RunBody) -> list[Any] | None:
    body = node.bodies["body"]
    limit = None if inputs[0] is None else int(numpy.asarray(inputs[0]).reshape(-1)[0])
    going = True if inputs[1] is None else bool(numpy.asarray(inputs[1]).reshape(-1)[0])
    carried = list(inputs[2:])
    gathered: list[list[Any]] = [[] for _ in body.outputs[1 + len(carried) :]]
    number = 0
    while going and (limit is None or number < limit):
        results = run(body, [numpy.array(number), numpy.array(True), *carried])
        going = bool(numpy.asarray(array_of(results[0])).reshape(-1)[0])
        carried = results[1 : 1 + len(carried)]
        for slices, one in zip(gathered, results[1 + len(carried) :], strict=True):
            slices.append(array_of(one))
        number += 1
    if gathered and not number:
        return None  # Only ONNX Runtime knows the shapes of what is empty.
    return [*carried, *(numpy.stack(slices) for slices in gathered)]


def _scan(node: Node, inputs: Sequence[Any], run: RunBody) -> list[Any] | None:
    body, attrs = node.bodies["body"], node.attrs
    count = attrs["num_scan_inputs"]
    carried, scanned = list(inputs[: len(inputs) - count]), inputs[len(inputs) - count :]
    axes = attrs.get("scan_input_axes") or [0] * count
    turned = attrs.get("scan_input_directions") or [0] * count
    slices = [
        numpy.flip(rows, 0) if backwards else rows
        for rows, backwards in (
            (numpy.moveaxis(value, axis, 0), backwards)
            for value, axis, backwards in zip(scanned, axes, turned, strict=True)
        )
    ]
    gathered: list[list[Any]] = [[] for _ in body.outputs[len(carried) :]]
    for row in range(len(slices[0])):
        results = run(body, [*carried, *(rows[row, ...] for rows in slices)])
        for found, one in zip(gathered, results[len(carried) :], strict=True):
            found.append(array_of(one))
        carried = results[: len(carried)]
    if gathered and not len(slices[0]):
        return None
    into = attrs.get("scan_output_axes") or [0] * len(gathered)
    turned = attrs.get("scan_output_directions") or [0] * len(gathered)
    return [
        *carried,
        *(
            numpy.stack(rows[::-1] if backwards else rows, axis)
            for rows, axis, backwards in zip(gathered, into, turned, strict=True)
        ),
    ]


_INTERPRETERS: dict[str, Interpreter] = {"If": _branch, "Loop": _loop, "Scan": _scan}
