"""Self-test of an interceptor with the installed TensorFlow; run by `python -m`.

Observes, edits and restores a few operators in each mode and compares the results with plain
TensorFlow. Exits with 0 if everything is right, else prints the reason to stderr. The environment
variable selects the interceptor. Run it in a separate process, since it may crash on an untested
release.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from amanda_core.driver_kit import OpContext, Tool, attach

__all__ = ["main"]


class _Watch(Tool):
    """Notes every operator, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: OpContext) -> None:
        self.seen.add(f"{context.namespace.rpartition('/')[2]} {context.op_type}")


class _Edit(Tool):
    """Doubles the output of `Relu`."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse, require_outputs=True)

    def analyse(self, context: OpContext) -> None:
        if context.op_type == "Relu":
            context.insert_after_op(_double)


def _double(value: Any) -> Any:
    return value * 2


def _eager() -> list[float]:
    variable = tf.Variable([-1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.relu(variable) * 3.0)
    return [float(loss), *map(float, tape.gradient(loss, variable))]


def _function() -> list[float]:
    variable = tf.Variable([-1.0, 2.0])
    loss_of = tf.function(lambda: tf.reduce_sum(tf.nn.relu(variable) * 3.0))
    with tf.GradientTape() as tape:
        loss = loss_of()
    return [float(loss), *map(float, tape.gradient(loss, variable))]


def _session() -> list[float]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.constant([-1.0, 2.0])
        loss = tf.reduce_sum(tf.nn.relu(x) * 3.0)
        (gradient,) = tf.compat.v1.gradients(loss, [x])
        found, gradients = session.run([loss, gradient])
    return [float(found), *map(float, gradients)]


_PROGRAMS = {"eager": _eager, "function": _function, "graph": _session}


def _require(condition: object, what: str) -> None:
    if not condition:
        raise SystemExit(f"The self-test failed: {what}")


def main() -> None:
    """Run the comparison, and exit with a message if a result differs."""
    plain = {mode: run() for mode, run in _PROGRAMS.items()}
    watch = _Watch()
    handle = attach(watch)
    try:
        watched = {mode: run() for mode, run in _PROGRAMS.items()}
    finally:
        handle.remove()
    _require(watched == plain, "watching changed a result")
    missing = [f"{mode} {op}" for mode in _PROGRAMS for op in ("Relu", "ReluGrad")]
    missing = [name for name in missing if name not in watch.seen]
    _require(not missing, f"operators were not seen: {', '.join(missing)}")
    handle = attach(_Edit())
    try:
        edited = {mode: run() for mode, run in _PROGRAMS.items()}
    finally:
        handle.remove()
    for mode, (loss, *_) in edited.items():
        _require(loss == 2 * plain[mode][0], f"an edit did not take effect ({mode})")
    again = {mode: run() for mode, run in _PROGRAMS.items()}
    _require(again == plain, "not all was restored")


if __name__ == "__main__":
    main()
