"""TensorFlow's modes as the conformance kit uses them."""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from amanda_core.testing import Backend, Gradients, Model, Program, Value, numbers

__all__ = ["EagerBackend", "FunctionBackend", "GraphBackend"]

v1 = tf.compat.v1


class _Scope(keras.layers.Layer):  # type: ignore[misc]  # No types.
    """A layer whose call is a given function."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__(name=name)
        self.function = function

    def call(self, *values: Any) -> Any:
        return self.function(*values)


class EagerBackend(Backend):
    """Operator by operator, gradients by a tape."""

    driver = "tensorflow"
    mode = "eager"
    functions: Mapping[str, Callable[..., Any]] = {
        "add": tf.add,
        "mul": tf.multiply,
        "relu": tf.nn.relu,
        "matmul": tf.matmul,
        "tanh": tf.tanh,
        "exp": tf.exp,
        "sum": tf.reduce_sum,
    }

    def from_python(self, value: Value, like: Any = None) -> Any:
        return tf.constant(value, tf.float32)

    def to_python(self, value: Any) -> Value:
        found: Value = value.numpy().tolist()
        return found

    def parameter(self, value: Value) -> Any:
        return tf.Variable(tf.constant(value, tf.float32))

    def gradients(
        self, program: Program, inputs: Sequence[Value], seeds: Sequence[Value]
    ) -> Gradients:
        given = [self.from_python(value) for value in inputs]
        arriving = [self.from_python(seed) for seed in seeds]
        with tf.GradientTape() as tape:
            for value in given:
                tape.watch(value)
            outputs = program.function(*given, *program.parameters)
        found = tape.gradient(list(outputs), [*given, *program.parameters], arriving)
        return self._gradients(program, outputs, found)

    def _gradients(self, program: Program, outputs: Any, found: Any) -> Gradients:
        names = [*program.model.inputs, *program.model.parameters]
        return Gradients(
            [self.to_python(output) for output in outputs],
            {name: self.to_python(g) for name, g in zip(names, found, strict=True)},
        )

    def scoped(
        self, name: str, function: Callable[..., Any], inner: Mapping[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        layer: Callable[..., Any] = _Scope(name, function)
        return layer

    def build_recomputed(self, model: Model, values: Mapping[str, Value]) -> Program:
        program = EagerBackend.build(self, model, values)
        forward, parameters = program.function, program.parameters
        # Variables are captured, as models do.
        again = tf.recompute_grad(lambda *inputs: forward(*inputs, *parameters))
        program.function = lambda *given: again(*given[: len(model.inputs)])
        return program

    def end_step(self, program: Program) -> None:
        keras.optimizers.SGD(0.1).apply([tf.zeros(2)], [keras.Variable([1.0, 2.0])])


class FunctionBackend(EagerBackend):
    """The forward program is a function, the tape outside."""

    mode = "function"

    def build(self, model: Model, values: Mapping[str, Value]) -> Program:
        return self._traced(super().build(model, values))

    def build_recomputed(self, model: Model, values: Mapping[str, Value]) -> Program:
        return self._traced(super().build_recomputed(model, values))

    def _traced(self, program: Program) -> Program:
        forward, parameters = program.function, program.parameters
        function = tf.function(lambda *inputs: forward(*inputs, *parameters))
        program.function = lambda *given: function(*given[: len(program.model.inputs)])
        return program

    def end_step(self, program: Program) -> None:
        program.function(tf.zeros(self.shape))


class GraphBackend(EagerBackend):
    """A graph with its gradients, run by a session."""

    mode = "graph"

    def build(self, model: Model, values: Mapping[str, Value]) -> Program:
        return self._graph(super().build, model, values)

    def build_recomputed(self, model: Model, values: Mapping[str, Value]) -> Program:
        return self._graph(super().build_recomputed, model, values)

    def _graph(
        self,
        build: Callable[[Model, Mapping[str, Value]], Program],
        model: Model,
        values: Mapping[str, Value],
    ) -> Program:
        graph = tf.Graph()
        with graph.as_default():
            program = build(model, values)
            given = [v1.placeholder(tf.float32, self.shape) for _ in model.inputs]
            outputs = list(program.function(*given, *program.parameters))
            arriving = [v1.placeholder(tf.float32, output.shape) for output in outputs]
            gradients = tf.gradients(outputs, [*given, *program.parameters], arriving)
            session = v1.Session(graph=graph)
            session.run(v1.global_variables_initializer())
        program.extra = (session, given, outputs, arriving, gradients)
        return program

    def parameter(self, value: Value) -> Any:
        return v1.get_variable(
            f"w{len(v1.global_variables())}",
            initializer=tf.constant(value, tf.float32),
            use_resource=True,
        )

    def to_python(self, value: Any) -> Value:
        # Sessions return arrays, routines get tensors.
        found: Value = (value.numpy() if isinstance(value, tf.Tensor) else value).tolist()
        return found

    def run(self, program: Program, inputs: Sequence[Value]) -> list[Value]:
        session, given, outputs, _, _ = program.extra
        found = session.run(outputs, dict(zip(given, inputs, strict=True)))
        return [self.to_python(output) for output in found]

    def gradients(
        self, program: Program, inputs: Sequence[Value], seeds: Sequence[Value]
    ) -> Gradients:
        session, given, outputs, arriving, gradients = program.extra
        feeds = dict(zip([*given, *arriving], [*inputs, *seeds], strict=True))
        values, found = session.run([outputs, gradients], feeds)
        return self._gradients(program, values, found)

    def end_step(self, program: Program) -> None:
        session, given, outputs, _, _ = program.extra
        session.run(outputs, {tensor: numbers(self.shape) for tensor in given})
