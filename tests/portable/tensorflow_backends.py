"""TensorFlow's modes as backends of the conformance kit."""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import keras
import tensorflow as tf

from amanda_core.testing import Backend, Gradients, Model, Program, Transformed, Value, numbers

__all__ = ["EagerBackend", "FunctionBackend", "GraphBackend"]

v1 = tf.compat.v1


class _Scope(keras.layers.Layer):  # type: ignore[misc]  # No types.
    """A layer whose call is a given function."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__(name=name)
        self.function = function

    def call(self, *values: Any) -> Any:
        return self.function(*values)


def _branch(program: Program) -> Program:
    """Put the program into a branch that is taken, which is unknown while tracing."""

    def branch(*given: Any) -> Any:
        is_number = tf.reduce_all(tf.equal(given[0], given[0]))
        return tf.cond(is_number, lambda: program.function(*given), lambda: (given[0],))

    return Program(program.model, branch, program.parameters)


def _loop(program: Program) -> Program:
    """Put the program into the body of a loop that runs three times on the same inputs."""

    def loop(*given: Any) -> Any:
        _, *results = tf.while_loop(
            lambda turn, *_: turn < 3,
            lambda turn, *_: (turn + 1, *program.function(*given)),
            (tf.constant(0), tf.zeros_like(given[0])),
        )
        return tuple(results)

    return Program(program.model, loop, program.parameters)


def _map(program: Program) -> Program:
    """Map the program over two copies of its input."""

    def mapped(x: Any, *rest: Any) -> Any:
        return (tf.map_fn(lambda one: program.function(one, *rest)[0], tf.stack([x, x]))[0],)

    return Program(program.model, mapped, program.parameters)


def _mixed() -> list[Any]:
    """Use integers, random numbers from a key, several outputs, and gradients."""
    x = tf.random.stateless_uniform([3, 4], seed=[1, 2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        dropped = tf.nn.experimental.stateless_dropout(x, 0.5, seed=[3, 4])
        values, places = tf.math.top_k(dropped, 2)
        random = tf.random.stateless_uniform(tf.shape(places), [5, 6], 0, 2, tf.int32)
        table = tf.reshape(tf.range(12.0), [4, 3])
        rows = tf.gather(table, places // 2 + random)
        left, right = tf.split(x, 2, axis=1)
        loss = tf.reduce_sum(values[..., None] * rows) + tf.reduce_mean(left * right)
    return [loss, places, tape.gradient(loss, x)]


class EagerBackend(Backend):
    """Operator by operator, with gradients from a tape."""

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
        "conv2d": partial(tf.nn.conv2d, strides=1, padding="VALID"),
    }
    conv2d_layouts: ClassVar[tuple[str, str]] = ("NHWC", "HWIO")
    not_interrupted: ClassVar[Mapping[str, str]] = {
        "tensorflow/python/eager/context.py": "C++ reads the context's handle without a check, and "
        "the process ends by SIGSEGV",
        "abc>": "C++ goes on after an exception in `isinstance`, and the process ends by SIGSEGV",
        "tensorflow/python/util/lock_util.py": "a function in Python releases the lock of a graph, "
        "and the next session waits for it for ever",
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
        return self._recomputed(EagerBackend.build(self, model, values))

    def _recomputed(self, program: Program) -> Program:
        forward, parameters = program.function, program.parameters
        # Variables are captured, as models do.
        again = tf.recompute_grad(lambda *inputs: forward(*inputs, *parameters))
        inputs = len(program.model.inputs)
        return Program(program.model, lambda *given: again(*given[:inputs]), parameters)

    def transformed(self, program: Program) -> Mapping[str, Transformed]:
        return {"recomputed": Transformed(self._recomputed(program), calls=2, backward=True)}

    def mixed(self) -> Callable[[], Sequence[Value]]:
        def program() -> list[Value]:
            return [value.numpy().tolist() for value in _mixed()]

        return program

    def of_another_type(self, value: Any) -> Any:
        return tf.cast(value, tf.float64)

    def end_step(self, program: Program) -> None:
        keras.optimizers.SGD(0.1).apply([tf.zeros(2)], [keras.Variable([1.0, 2.0])])


class FunctionBackend(EagerBackend):
    """The forward program as a function, with the tape outside."""

    mode = "function"

    def build(self, model: Model, values: Mapping[str, Value]) -> Program:
        return self._traced(super().build(model, values))

    def build_recomputed(self, model: Model, values: Mapping[str, Value]) -> Program:
        return self._traced(super().build_recomputed(model, values))

    def _traced(self, program: Program) -> Program:
        forward, parameters = program.function, program.parameters
        function = tf.function(lambda *inputs: forward(*inputs, *parameters))
        inputs = len(program.model.inputs)
        # What is traced, and what it is made of, for `traces` and `transformed`.
        extra = (function, Program(program.model, forward, parameters))
        return Program(program.model, lambda *given: function(*given[:inputs]), parameters, extra)

    def transformed(self, program: Program) -> Mapping[str, Transformed]:
        _, plain = program.extra
        return {
            "branch": Transformed(self._traced(_branch(plain))),
            "loop": Transformed(self._traced(_loop(plain)), calls=3),
            "map": Transformed(self._traced(_map(plain)), calls=2),
            "recomputed": Transformed(
                self._traced(self._recomputed(plain)), calls=2, backward=True
            ),
        }

    def traces(self, program: Program) -> int:
        traces: int = program.extra[0].experimental_get_tracing_count()
        return traces

    def mixed(self) -> Callable[[], Sequence[Value]]:
        function = tf.function(_mixed)
        return lambda: [value.numpy().tolist() for value in function()]

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
            shapes = [model.shapes.get(name, self.shape) for name in model.inputs]
            given = [v1.placeholder(tf.float32, shape) for shape in shapes]
            outputs = list(program.function(*given, *program.parameters))
            arriving = [v1.placeholder(tf.float32, output.shape) for output in outputs]
            gradients = tf.gradients(outputs, [*given, *program.parameters], arriving)
            session = v1.Session(graph=graph)
            session.run(v1.global_variables_initializer())
        program.extra = (session, given, outputs, arriving, gradients)
        return program

    def transformed(self, program: Program) -> Mapping[str, Transformed]:
        model = program.model
        values = model.values(self.shape)

        def graph(change: Callable[[Program], Program]) -> Program:
            return self._graph(lambda m, v: change(EagerBackend.build(self, m, v)), model, values)

        return {
            "branch": Transformed(graph(_branch)),
            "loop": Transformed(graph(_loop), calls=3),
            "map": Transformed(graph(_map), calls=2),
            "recomputed": Transformed(graph(self._recomputed), calls=2, backward=True),
        }

    def mixed(self) -> Callable[[], Sequence[Value]]:
        graph = tf.Graph()
        with graph.as_default():
            found = _mixed()
            session = v1.Session(graph=graph)
        return lambda: [value.tolist() for value in session.run(found)]

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
