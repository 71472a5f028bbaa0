"""Programs that run twice: in functions with tools, and eagerly with the edits written in.

`Ops` runs operators by their names. In the reference program, without tools, it applies to each op
what the tools were requested to do there. An edited value replaces the original, and its gradient
passes straight through, by `tf.custom_gradient`, at every order of differentiation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from amanda_core.testing.kit.tools import Edit, Routine


def is_differentiable(value: Any) -> bool:
    """Return True if a tensor's dtype has gradients, or those of all tensors in a list."""
    types = [tensor.dtype for tensor in tf.nest.flatten(value)]
    return all(dtype.is_floating or dtype.is_complex for dtype in types)


def straight(value: Any, routine: Routine) -> Any:
    """Return `routine(value)` with the gradient of `value`, a tensor or a list of several."""
    if not is_differentiable(value):
        return routine(value)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*tensors: Any) -> Any:
        new = routine(tf.nest.pack_sequence_as(value, tensors))
        new = tensors if new is None else tf.nest.flatten(new)
        return [tf.identity(tensor) for tensor in new], lambda *gradients: gradients

    return tf.nest.pack_sequence_as(value, run(*tf.nest.flatten(value)))


def at_gradient(value: Any, routine: Routine) -> Any:
    """Return `value`, a tensor or a list of several, with a gradient changed by `routine`."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*tensors: Any) -> Any:
        def back(*gradients: Any) -> Any:
            arrived = tf.nest.pack_sequence_as(value, gradients)
            return tf.nest.flatten(straight(arrived, routine))

        return [tf.identity(tensor) for tensor in tensors], back

    if not is_differentiable(value):
        return value
    return tf.nest.pack_sequence_as(value, run(*tf.nest.flatten(value)))


class Ops:
    """Runs operators; in the reference program, with `edits` written in.

    A program gets one of these, and tensors; its result is differentiated.
    """

    def __init__(self, edits: Iterable[Edit] | None = None) -> None:
        self.edits = None if edits is None else list(edits)
        self._functions: dict[Callable[..., Any], Any] = {}

    @property
    def is_reference(self) -> bool:
        """Whether edits are written in, and functions, loops and branches are Python's."""
        return self.edits is not None

    def __call__(self, op_type: str, name: str, *inputs: Any, **attrs: Any) -> Any:
        """Run an op with one output."""

        def run(*values: Any) -> Any:
            return _RUN[op_type](*values, name=name, **attrs)

        return self.run(run, (op_type, name), *inputs)

    def run(self, run: Routine, names: Collection[str], *inputs: Any) -> Any:
        """Run an op with a name for edits; return its output, or a tuple of several."""
        if self.edits is None:
            return run(*inputs)
        mine = [edit for edit in self.edits if edit.name in names]
        values = tf.nest.map_structure(tf.convert_to_tensor, list(inputs))
        for edit in reversed([edit for edit in mine if edit.kind == "grad_in"]):
            values[edit.position or 0] = at_gradient(values[edit.position or 0], edit.routine)
        for edit in mine:
            if edit.kind == "before":
                _edit(values, edit)
        for edit in mine:
            if edit.kind == "replace":
                run = edit.routine
        for edit in mine:
            if edit.kind == "backward":
                run = _with_backward(run, edit.routine)
        found = run(*values)
        outputs = list(found) if isinstance(found, (list, tuple)) else [found]
        for edit in mine:
            if edit.kind == "after":
                _edit(outputs, edit)
        for edit in reversed([edit for edit in mine if edit.kind == "grad_out"]):
            outputs[edit.position or 0] = at_gradient(outputs[edit.position or 0], edit.routine)
        return tuple(outputs) if isinstance(found, (list, tuple)) else outputs[0]

    def call(self, function: Callable[..., Any], *values: Any) -> Any:
        """Call a function of the program, as a separate `tf.function`."""
        if self.is_reference:
            return function(*values)
        if function not in self._functions:
            self._functions[function] = tf.function(function, autograph=False)
        return self._functions[function](*values)

    def loop(self, times: int, body: Callable[..., Any], *state: Any, **kwargs: Any) -> list[Any]:
        """Repeat `state = body(*state)` so many times."""
        if self.is_reference:
            for _ in range(times):
                state = tuple(body(*state))
            return list(state)
        results: list[Any]
        _, *results = tf.while_loop(
            lambda i, *_: i < times,
            lambda i, *values: [i + 1, *body(*values)],
            [tf.constant(0), *state],
            **kwargs,
        )
        return results

    def choose(self, which: Any, then: Callable[[], Any], other: Callable[[], Any]) -> Any:
        """Run one of two branches."""
        if self.is_reference:
            return then() if bool(which) else other()
        return tf.cond(which, then, other)


_RUN: dict[str, Callable[..., Any]] = {
    "MatMul": tf.linalg.matmul,
    "Mul": lambda x, y, name: tf.raw_ops.Mul(x=x, y=y, name=name),
    "AddV2": lambda x, y, name: tf.raw_ops.AddV2(x=x, y=y, name=name),
    "Sub": lambda x, y, name: tf.raw_ops.Sub(x=x, y=y, name=name),
    "RealDiv": lambda x, y, name: tf.raw_ops.RealDiv(x=x, y=y, name=name),
    "Maximum": lambda x, y, name: tf.raw_ops.Maximum(x=x, y=y, name=name),
    "Tanh": tf.tanh,
    "Sigmoid": tf.sigmoid,
    "Exp": tf.exp,
    "Relu": tf.nn.relu,
    "Softplus": tf.nn.softplus,
    "Square": tf.square,
    "Neg": tf.negative,
    "Identity": tf.identity,
    "Sum": tf.reduce_sum,
    "Softmax": tf.nn.softmax,
}


def _edit(values: list[Any], edit: Edit) -> None:
    position = edit.position or 0
    if edit.autodiff:
        values[position] = edit.routine(values[position])
    else:
        values[position] = straight(values[position], edit.routine)


def _with_backward(run: Routine, routine: Routine) -> Routine:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def replaced(*values: Any) -> Any:
        def back(*gradients: Any) -> list[Any]:
            # One for each tensor, also of lists.
            made = routine(*gradients)
            made = made if isinstance(made, (list, tuple)) else [made]
            none = [
                tf.nest.map_structure(lambda _: None, value) if gradient is None else gradient
                for gradient, value in zip(made, values, strict=True)
            ]
            return list(tf.nest.flatten(none))

        return run(*values), back

    return lambda *values: replaced(*values)


@contextmanager
def as_written() -> Iterator[None]:
    """Keep TensorFlow from rewriting formulas, which depends on the surrounding ops."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def values(*shapes: Sequence[int], dtype: Any = tf.float64) -> list[Any]:
    """Return random tensors, the same for the same shapes."""
    random = np.random.default_rng(0)
    return [tf.constant(random.normal(size=shape), dtype) for shape in shapes]


def outside(program: Callable[..., Any], *given: Any) -> list[Any]:
    """Return the result of a program, and the gradients of what it is given."""
    with tf.GradientTape() as tape:
        tape.watch(given)
        result = program(*given)
    return [result, *tape.gradient(result, given)]
