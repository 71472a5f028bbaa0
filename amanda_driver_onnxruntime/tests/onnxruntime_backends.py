"""ONNX Runtime as the conformance kit uses it: models as graphs, and inside branches and loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from amanda_core.testing import Backend, Program, Value
from amanda_core.testing.kit.backend import Transformed
from amanda_core.testing.kit.models import Model, Node
from amanda_driver_onnxruntime.onnxruntime_internals.sessions import ENTRY_POINTS
from amanda_driver_onnxruntime.plugin import HOOKS

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
TYPES = {
    "add": "Add",
    "mul": "Mul",
    "relu": "Relu",
    "matmul": "MatMul",
    "conv2d": "Conv",
    "tanh": "Tanh",
    "exp": "Exp",
    "sum": "ReduceSum",
}


def options(level: int = 99) -> onnxruntime.SessionOptions:
    """Return options of a session that is quiet and uses one thread."""
    found = onnxruntime.SessionOptions()
    found.intra_op_num_threads = 1
    found.log_severity_level = 3
    found.graph_optimization_level = onnxruntime.GraphOptimizationLevel(level)
    return found


def session_of(graph: onnx.GraphProto, level: int = 99) -> onnxruntime.InferenceSession:
    """Return a session of a graph."""
    return onnxruntime.InferenceSession(model_of(graph).SerializeToString(), options(level))


def model_of(graph: onnx.GraphProto) -> onnx.ModelProto:
    """Return a model of a graph."""
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def value(name: str, kind: int = FLOAT, shape: Any = None) -> onnx.ValueInfoProto:
    """Return the description of an input or output."""
    return helper.make_tensor_value_info(name, kind, shape)


def weight(name: str, values: Any, dtype: Any = numpy.float32) -> onnx.TensorProto:
    """Return an initializer."""
    return numpy_helper.from_array(numpy.array(values, dtype), name)


def nodes_of(nodes: Sequence[Node], times: int = 1, state: str = "") -> list[onnx.NodeProto]:
    """Return the operators of a model of the kit, those of a loop after one another."""
    found, names = [], dict[str, str]()
    for turn in range(times):
        for node in nodes:
            name = f"{node.result}{turn or ''}"
            path = f"/{node.scope}/" if node.scope else ""
            inputs = [names.get(operand, operand) for operand in node.operands]
            attrs: dict[str, Any] = {"keepdims": 0} if node.common_type == "sum" else {}
            kind = TYPES[node.common_type]
            found.append(helper.make_node(kind, inputs, [name], f"{path}{name}", **attrs))
            names[node.result] = name
        names[state] = names[nodes[-1].result]
    return found


class OnnxRuntimeBackend(Backend):
    """Models of the kit as sessions."""

    driver = "onnxruntime"
    mode = "graph"
    plugin = HOOKS
    functions: Mapping[str, Callable[..., Any]] = {
        "add": numpy.add,
        "mul": numpy.multiply,
        "relu": lambda x: numpy.maximum(x, 0),
        "matmul": numpy.matmul,
        "tanh": numpy.tanh,
        "exp": numpy.exp,
        "sum": numpy.sum,
        "conv2d": lambda x, w: _called("Conv", x, w),
    }
    #: The level of optimisation.
    level: ClassVar[int] = 99

    def from_python(self, value: Value, like: Any = None) -> Any:
        return numpy.array(value, numpy.float32)

    def to_python(self, value: Any) -> Value:
        found: Value = numpy.asarray(value).tolist()
        return found

    def build(self, model: Model, values: Mapping[str, Value]) -> Program:
        outputs = [f"{name}{model.times - 1 or ''}" for name in model.outputs]
        graph = helper.make_graph(
            nodes_of(model.nodes, model.times, model.inputs[0]),
            model.name,
            [value(name) for name in model.inputs],
            [value(name) for name in outputs],
            [weight(name, values[name]) for name in model.parameters],
        )
        return self._program(model, graph)

    def _program(self, model: Model, graph: onnx.GraphProto) -> Program:
        session = session_of(graph, self.level)

        def run(*inputs: Any) -> Any:
            return session.run(None, dict(zip(model.inputs, inputs, strict=True)))

        return Program(model, run, [], session)

    def run(self, program: Program, inputs: Sequence[Value]) -> list[Value]:
        return [self.to_python(one) for one in program.function(*map(self.from_python, inputs))]

    def transformed(self, program: Program) -> Mapping[str, Transformed]:
        model, session = program.model, program.extra
        inner = onnx.load_model_from_string(session._model_bytes).graph
        body = list(inner.node)
        ends = [one.name for one in inner.output]
        outputs = [value(f"{name}.out") for name in model.outputs]
        names = [one.name for one in outputs]
        taken = helper.make_graph(body, "taken", [], [value(name) for name in ends])
        left = helper.make_graph(
            [helper.make_node("Identity", [model.inputs[0]], [f"{n}.left"]) for n in ends],
            "left",
            [],
            [value(f"{n}.left") for n in ends],
        )
        branch = helper.make_graph(
            [helper.make_node("If", ["yes"], names, then_branch=taken, else_branch=left)],
            "branch",
            list(inner.input),
            outputs,
            [*inner.initializer, weight("yes", True, bool)],
        )
        step = helper.make_graph(
            [helper.make_node("Identity", ["going"], ["go"]), *body],
            "step",
            [value("turn", INT64, []), value("going", BOOL, []), *map(_state, ends)],
            [value("go", BOOL, []), *(value(name) for name in ends)],
        )
        start = [model.inputs[0] for _ in ends]
        loop = helper.make_graph(
            [helper.make_node("Loop", ["two", "", *start], names, body=step)],
            "loop",
            list(inner.input),
            outputs,
            [*inner.initializer, weight("two", 2, numpy.int64)],
        )
        return {
            "branch": Transformed(self._program(model, branch)),
            "loop": Transformed(self._program(model, loop), calls=2),
        }

    def mixed(self) -> Callable[[], Sequence[Value]]:
        graph = helper.make_graph(
            [
                helper.make_node("TopK", ["x", "k"], ["top", "at"]),
                helper.make_node("Cast", ["at"], ["as_float"], to=FLOAT),
                helper.make_node("Mul", ["top", "as_float"], ["y"]),
                helper.make_node("RandomUniformLike", ["y"], ["noise"], seed=3.0),
                helper.make_node("Mul", ["noise", "zero"], ["nothing"]),
                helper.make_node("Add", ["y", "nothing"], ["z"]),
            ],
            "mixed",
            [value("x")],
            [value("z"), value("at", INT64)],
            [weight("k", [2], numpy.int64), weight("zero", 0)],
        )
        session, x = session_of(graph, self.level), numpy.random.default_rng(3)
        given = {"x": x.random((2, 3), numpy.float32)}
        return lambda: [self.to_python(one) for one in session.run(None, given)]

    def of_another_type(self, value: Any) -> Any:
        return value.astype(numpy.float64)

    def end_step(self, program: Program) -> None:
        program.function(*(numpy.zeros(self.shape, numpy.float32) for _ in program.model.inputs))

    def found(self) -> Mapping[str, object]:
        own = {f"{owner.__name__}.{name}": vars(owner)[name] for owner, name in ENTRY_POINTS}
        return {**super().found(), **own}


class BasicBackend(OnnxRuntimeBackend):
    """The same without fusions."""

    level = 1

    @property
    def title(self) -> str:
        return f"{super().title}, ORT_ENABLE_BASIC"


def _state(name: str) -> onnx.ValueInfoProto:
    return value(f"{name}.state")


def _called(op_type: str, *inputs: Any) -> Any:
    names = [f"i{n}" for n in range(len(inputs))]
    graph = helper.make_graph(
        [helper.make_node(op_type, names, ["y"])], "one", list(map(value, names)), [value("y")]
    )
    return session_of(graph).run(None, dict(zip(names, inputs, strict=True)))[0]
