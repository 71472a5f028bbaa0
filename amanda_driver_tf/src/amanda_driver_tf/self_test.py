"""Self-test of an interceptor with the installed TensorFlow; run by `python -m`.

Observes, edits and restores a few operators in each mode and compares the results with plain
TensorFlow. Exits with 0 if everything is right, else prints the reason to stderr. The environment
variable selects the interceptor. Run it in a separate process, since it may crash on an untested
release.
"""

from __future__ import annotations

import tensorflow as tf

from amanda_core.driver_kit import OpContext, Tool, applied, doubling, require, require_seen

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


def _run() -> dict[str, list[float]]:
    return {mode: run() for mode, run in _PROGRAMS.items()}


def main() -> None:
    """Run the comparison, and exit with a message if a result differs."""
    plain, watch = _run(), _Watch()
    require(applied(watch, _run) == plain, "watching changed a result")
    wanted = {f"{mode} {op}" for mode in _PROGRAMS for op in ("Relu", "ReluGrad")}
    require_seen(wanted, list(watch.seen))
    edited = applied(doubling("Relu", require_outputs=True), _run)
    for mode, (loss, *_) in edited.items():
        require(loss == 2 * plain[mode][0], f"an edit did not take effect ({mode})")
    require(_run() == plain, "not all was restored")


if __name__ == "__main__":
    main()
