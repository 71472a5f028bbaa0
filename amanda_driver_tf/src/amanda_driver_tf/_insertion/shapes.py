"""What is checked of the shapes of what routines return into a graph.

Owns the checks. A shape that is known while the graph is built is checked at once; that of a staged
routine's tensor may show only when the graph runs, and is then checked by an operation, the name of
which says which routine it was.
"""

from __future__ import annotations

import itertools
import re
import weakref
from typing import Any

import tensorflow as tf

from amanda_core.errors import UnsupportedError
from amanda_core.plan import Step
from amanda_driver_tf._tensorflow_internals.modules import dtypes, ops

__all__ = ["fitting", "of_same_rows", "of_same_shape", "refusal"]

_HANDLES = (dtypes.resource, dtypes.variant)
_NAME = re.compile(r"amanda_shape_\d+")
_MOST_DIMENSIONS = 254  # That a tensor has in TensorFlow.
_NUMBERS = itertools.count(1)


class _Check:
    """What is said where an operation finds another shape than there should be."""

    def __init__(self, where: str, fix: str) -> None:
        self.where, self.fix = where, fix


#: Names of the operations that check; they live as long as the graphs that these are in.
_CHECKS: weakref.WeakValueDictionary[str, _Check] = weakref.WeakValueDictionary()


def fitting(value: Any, shape: Any, step: Step) -> Any:
    """A routine's tensor where a graph, and its gradients, were built for a shape.

    Args:
        value: The tensor.
        shape: The shape, of which a part may be unknown; None for any.
        step: The step that it is from.
    """
    # A handle has another shape in a graph than it has alone.
    if shape is None or value.dtype in _HANDLES or value.shape.is_subtype_of(shape):
        return value
    fix = "Return a tensor of the same shape"
    if not shape.is_compatible_with(value.shape):
        raise UnsupportedError(
            f"A routine returned a tensor of shape {value.shape} where the graph, and its "
            f"gradients, were built for {shape}",
            where=step.where,
            fix=fix,
        )
    return tf.ensure_shape(value, shape, name=_check(step, fix))


def of_same_shape(value: Any, old: Any, step: Step, what: str, fix: str) -> Any:
    """A routine's tensor that must have the shape of the one that it was given.

    Args:
        value: The tensor.
        old: The one that it was given.
        step: The step that it is from.
        what: What the tensors are, after "A routine returned".
        fix: What the user is told to do instead.
    """
    if value.dtype in _HANDLES:
        return value
    if not old.shape.is_compatible_with(value.shape):
        raise UnsupportedError(
            f"A routine returned {what.format(value.shape, old.shape)}", where=step.where, fix=fix
        )
    if value.shape.is_fully_defined() and old.shape.is_fully_defined():
        return value
    name = _check(step, fix)
    found, wanted = tf.shape(value), tf.shape(old)
    if value.shape.rank is not None and old.shape.rank is not None:
        return _checked(value, tf.equal(found, wanted), name)
    same = tf.reduce_all(tf.equal(_padded(found), _padded(wanted)))
    # A dimension more, for a scalar has none that could be wrong.
    checked = _checked(value[tf.newaxis], tf.fill([tf.size(found) + 1], same), name)
    # A gradient for which a shape is enough gets the right one.
    return tf.reshape(checked, wanted)


def of_same_rows(slices: Any, indices: Any, step: Step) -> Any:
    """The values of slices that must be of certain rows.

    Who adds up the slices of a graph reads the indices that they had when it was built.

    Args:
        slices: `tf.IndexedSlices` that a routine returned.
        indices: The rows that they must be of.
        step: The step that it is from.
    """
    if slices.indices is indices:
        return slices.values
    fix = "Return tf.IndexedSlices of the same indices"
    found = tf.cast(slices.indices, indices.dtype)
    if tf.executing_eagerly():
        if found.shape != indices.shape or not tf.reduce_all(tf.equal(found, indices)):
            raise UnsupportedError(
                "A routine returned tf.IndexedSlices of other rows in a graph",
                where=step.where,
                fix=fix,
            )
        return slices.values
    same = tf.reduce_all(tf.equal(_padded_rows(found, indices), _padded_rows(indices, found)))
    rank = slices.values.shape.rank
    right = tf.fill([tf.rank(slices.values) if rank is None else rank], same)
    return _checked(slices.values, right, _check(step, fix))


def _padded_rows(rows: Any, others: Any) -> Any:
    """Rows, and so many more that no row is as there are of others more than of these."""
    missing = tf.maximum(tf.size(others) - tf.size(rows), 0)
    return tf.concat([rows, tf.fill([missing], tf.constant(-1, rows.dtype))], 0)


def _checked(value: Any, right: Any, name: str) -> Any:
    """A tensor as it is; an error when it runs, if not all dimensions are right."""
    # The whole of it, which cannot begin at -1. XLA leaves assertions out, and TensorFlow's
    # optimiser takes reshaping and broadcasting away once it knows what they must result in.
    begin = tf.where(right, 0, -1)
    return tf.slice(value, begin, -tf.ones_like(begin), name=name)


def _padded(shape: Any) -> Any:
    """A shape as a vector that is as long as those of other ranks."""
    return tf.concat([shape, tf.fill([_MOST_DIMENSIONS - tf.size(shape)], -1)], 0)


def _check(step: Step, fix: str) -> str:
    name = f"amanda_shape_{next(_NUMBERS)}"
    check = _CHECKS[name] = _Check(step.where, fix)
    graph = ops.get_default_graph()
    graph._amanda_checks = [*getattr(graph, "_amanda_checks", ()), check]
    return name


def refusal(error: BaseException) -> UnsupportedError | None:
    """Return the error to raise for an error of TensorFlow's that a checking operation raised."""
    if not isinstance(error, tf.errors.InvalidArgumentError):
        return None
    found = _NAME.search(str(error))
    check = _CHECKS.get(found[0]) if found is not None else None
    if check is None:
        return None
    return UnsupportedError(
        "A routine returned a tensor of another shape, or slices of other rows, than the graph, "
        "and its gradients, need",
        where=check.where,
        fix=check.fix,
    )
