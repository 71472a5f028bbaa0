"""Checks of the shapes of tensors that routines return into a graph.

A shape that is known while the graph is built is checked at once. The shape of a staged routine's
tensor may be known only when the graph runs. It is then checked by an operation whose name
identifies the routine.
"""

from __future__ import annotations

import itertools
import re
import weakref
from typing import Any

import tensorflow as tf

from amanda_core.driver_kit import Step
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.tensorflow_internals.modules import dtypes, ops

__all__ = ["check_same_rows", "check_same_shape", "check_shape", "failed_check_error"]

_HANDLES = (dtypes.resource, dtypes.variant)
_NAME = re.compile(r"amanda_shape_\d+")
_MOST_DIMENSIONS = 254  # TensorFlow's limit for the rank of a tensor.
_NUMBERS = itertools.count(1)


class _Check:
    """The location and advice to report if a checking operation fails."""

    def __init__(self, where: str, fix: str) -> None:
        self.where, self.fix = where, fix


#: Name of a checking operation -> its check, which lives as long as the operation's graph.
_CHECKS: weakref.WeakValueDictionary[str, _Check] = weakref.WeakValueDictionary()


def check_shape(value: Any, shape: Any, step: Step) -> Any:
    """Return a routine's tensor, checked against the shape that the graph was built for.

    Args:
        value: The tensor.
        shape: The shape, which may be partly unknown; None for any.
        step: The step that returned it.
    """
    # The shape of a handle in a graph differs from that of the eager handle.
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


def check_same_shape(value: Any, old: Any, step: Step, what: str, fix: str) -> Any:
    """Return a routine's tensor, checked to have the shape of the tensor it replaces.

    Args:
        value: The tensor.
        old: The tensor that the routine was given.
        step: The step that returned it.
        what: A description of the tensors, which follows "A routine returned".
        fix: The advice to the user.
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
    # One more dimension, since a scalar has none whose slice could fail.
    checked = _checked(value[tf.newaxis], tf.fill([tf.size(found) + 1], same), name)
    # Some gradients are computed from the shape alone, so state the right one.
    return tf.reshape(checked, wanted)


def check_same_rows(slices: Any, indices: Any, step: Step) -> Any:
    """Return the values of slices, checked to have the row indices `indices`.

    The ops that accumulate slices in a graph read the indices known when it was built.

    Args:
        slices: `tf.IndexedSlices` that a routine returned.
        indices: The required row indices.
        step: The step that returned them.
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
    """Pad `rows` with -1, which is not a row, to at least the length of `others`."""
    missing = tf.maximum(tf.size(others) - tf.size(rows), 0)
    return tf.concat([rows, tf.fill([missing], tf.constant(-1, rows.dtype))], 0)


def _checked(value: Any, right: Any, name: str) -> Any:
    """Return `value` through an operation that fails at run time unless all of `right` is True."""
    # A slice of everything, which fails if it begins at -1. XLA ignores assertions, and
    # TensorFlow's optimizer removes reshapes and broadcasts once it knows their result's shape.
    begin = tf.where(right, 0, -1)
    return tf.slice(value, begin, -tf.ones_like(begin), name=name)


def _padded(shape: Any) -> Any:
    """Pad a shape vector to a fixed length, so that shapes of different ranks can be compared."""
    return tf.concat([shape, tf.fill([_MOST_DIMENSIONS - tf.size(shape)], -1)], 0)


def _check(step: Step, fix: str) -> str:
    name = f"amanda_shape_{next(_NUMBERS)}"
    check = _CHECKS[name] = _Check(step.where, fix)
    graph = ops.get_default_graph()
    graph._amanda_checks = [*getattr(graph, "_amanda_checks", ()), check]
    return name


def failed_check_error(error: BaseException) -> UnsupportedError | None:
    """Return the error to raise if `error` came from a checking operation, else None."""
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
