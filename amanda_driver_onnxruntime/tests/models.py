"""Models as ONNX graphs, for the tests of this driver."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import onnx
from onnx import helper

from .onnxruntime_backends import BOOL, FLOAT, INT64, model_of, value, weight


def drawn(*shape: int, seed: int = 0) -> Any:
    """Return random numbers."""
    return numpy.random.default_rng(seed).standard_normal(shape).astype(numpy.float32)


#: What the models get for `x`.
X = drawn(2, 3, 8, 8)


def conv_net(seed: int = 0, *, normalized: bool = True) -> onnx.ModelProto:
    """Return a network of convolutions, one of them in groups."""
    scales = [f"bn.{name}" for name in "sbmv"] if normalized else []
    norm = "BatchNormalization" if normalized else "Identity"
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "stem.weight", "stem.bias"], ["a"], "/stem/Conv", pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["b"], "/Relu"),
        node("Conv", ["b", "deep.weight"], ["c"], "/deep/Conv", group=4, strides=[2, 2]),
        node(norm, ["c", *scales], ["d"], f"/bn/{norm}"),
        node("MaxPool", ["d"], ["e"], "/MaxPool", kernel_shape=[2, 2]),
        node("GlobalAveragePool", ["e"], ["f"], "/Pool"),
        node("Flatten", ["f"], ["g"], "/Flatten"),
        node("Gemm", ["g", "fc.weight", "fc.bias"], ["h"], "/fc/Gemm", transB=1),
        node("Softmax", ["h"], ["y"], "/Softmax"),
    ]
    weights = [
        weight("stem.weight", drawn(4, 3, 3, 3, seed=seed)),
        weight("stem.bias", drawn(4)),
        weight("deep.weight", drawn(4, 1, 3, 3)),
        *(weight(name, abs(drawn(4))) for name in scales),
        weight("fc.weight", drawn(5, 4)),
        weight("fc.bias", drawn(5)),
    ]
    return model_of(helper.make_graph(nodes, "convs", [value("x")], [value("y")], weights))


def old_net(opset: int, ir_version: int) -> onnx.ModelProto:
    """Return a network of operators whose forms have changed since, for versions from 7 to 12."""
    weights = [weight("w", drawn(4, 3, 3, 3)), *(weight(n, abs(drawn(4))) for n in "sbmv")]
    nodes, last = list[onnx.NodeProto](), "x"

    def add(op_type: str, *inputs: str, outputs: int = 1, since: int = 0, **attrs: Any) -> None:
        """Add a node, some of whose attributes are inputs from some version on."""
        nonlocal last
        given = [last, *inputs]
        if since and opset >= since:
            for name, numbers in attrs.items():
                given.append(f"{op_type}.{name}")
                whole = numpy.array(numbers).dtype.kind == "i"
                kind = numpy.int64 if whole else numpy.float32
                weights.append(weight(given[-1], numbers, kind))
            attrs = {}
        names = [f"{op_type}.{n}" for n in range(outputs)]
        nodes.append(helper.make_node(op_type, given, names, op_type, **attrs))
        last = names[0]

    add("Conv", "w", pads=[1, 1, 1, 1])
    add("BatchNormalization", *"sbmv")
    ratio: dict[str, Any] = {"ratio": 0.3} if opset < 12 else {}
    add("Dropout", **ratio)
    add("AveragePool", kernel_shape=[2, 2], strides=[2, 2])
    region: dict[str, Any] = {"roi": []} if opset > 10 else {}
    add("Upsample" if opset < 10 else "Resize", since=9, **region, scales=[1.0, 1.0, 2.0, 2.0])
    add("Pad", since=11, pads=[0, 0, 1, 1, 0, 0, 1, 1])
    add("Slice", since=10, starts=[1, 1], ends=[5, 5], axes=[2, 3])
    add("Clip", since=11, min=-1.0, max=2.0)
    add("Split", outputs=2, axis=1, split=[2, 2])
    add("Concat", "Split.1", axis=1)
    add("ReduceSum", axes=[2], keepdims=0)
    add("TopK", outputs=2, since=10, k=2 if opset < 10 else [2])
    add("Softmax", axis=1)
    inputs = [value("x")]
    if ir_version < 4:
        inputs += [helper.make_tensor_value_info(w.name, w.data_type, w.dims) for w in weights]
    graph = helper.make_graph(nodes, "old", inputs, [value(last)], weights)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)


def quantized() -> onnx.ModelProto:
    """Return a product of quantized weights, with and without their own operators."""
    node = helper.make_node
    nodes = [
        node("DequantizeLinear", ["w8", "scale", "zero"], ["w"], "/dequantize"),
        node("Flatten", ["x"], ["flat"], "/flatten"),
        node("MatMul", ["flat", "w"], ["a"], "/product"),
        node("DynamicQuantizeLinear", ["a"], ["q", "s", "z"], "/quantize"),
        node("MatMulInteger", ["q", "w2", "z"], ["n"], "/integers"),
        node("Cast", ["n"], ["m"], "/cast", to=FLOAT),
        node("Mul", ["m", "s"], ["y"], "/scale"),
    ]
    numbers = numpy.random.default_rng(1).integers(-128, 127, (192, 6))
    weights = [
        weight("w8", numbers, numpy.int8),
        weight("w2", numbers[:6], numpy.int8),
        weight("scale", 0.02),
        weight("zero", 3, numpy.int8),
    ]
    return model_of(helper.make_graph(nodes, "quantized", [value("x")], [value("y")], weights))


def control_flow(times: int = 5) -> onnx.ModelProto:
    """Return a model with If, Loop and Scan, in an order in which its nodes cannot run."""
    node, rank = helper.make_node, [None] * 4
    then = helper.make_graph(
        [node("Mul", ["total", "w"], ["t"], "twice")], "then", [], [value("t")]
    )
    other = helper.make_graph([node("Neg", ["total"], ["o"], "minus")], "other", [], [value("o")])
    body = helper.make_graph(
        [
            node("Add", ["state", "w"], ["next"], "grow"),
            node("ReduceMax", ["next"], ["top"], "top", keepdims=0),
            node("Less", ["top", "limit"], ["go"], "go"),
            node("Identity", ["next"], ["row"], "row"),
        ],
        "body",
        [value("n", INT64, []), value("going", BOOL, []), value("state")],
        [value("go", BOOL, []), value("next"), value("row")],
    )
    step = helper.make_graph(
        [node("Add", ["sum_in", "each"], ["sum_out"], "add"), node("Exp", ["each"], ["e"], "exp")],
        "step",
        [value("sum_in"), value("each")],
        [value("sum_out", shape=rank), value("e", shape=rank)],
    )
    nodes = [
        node("If", ["positive"], ["y"], "branch", then_branch=then, else_branch=other),
        node("Greater", ["top", "zero"], ["positive"], "positive"),
        node("ReduceMax", ["total"], ["top"], "largest", keepdims=0),
        node(
            "Scan",
            ["last", "flipped"],
            ["total", "exps"],
            "scan",
            body=step,
            num_scan_inputs=1,
            scan_input_directions=[1],
            scan_output_axes=[1],
        ),
        node("Neg", ["rows"], ["flipped"], "negative"),
        node("Loop", ["times", "", "x"], ["last", "rows"], "loop", body=body),
    ]
    weights = [
        weight("w", 0.5),
        weight("zero", 0),
        weight("limit", 4.0),
        weight("times", times, numpy.int64),
    ]
    outputs = [value("y"), value("exps"), value("rows")]
    return model_of(helper.make_graph(nodes, "control", [value("x")], outputs, weights))


def functions() -> onnx.ModelProto:
    """Return a model with a local function that calls another one."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    node = helper.make_node
    inner = helper.make_function(
        "own", "Square", ["a"], ["b"], [node("Mul", ["a", "a"], ["b"], "square")], opsets
    )
    outer = helper.make_function(
        "own",
        "Norm",
        ["a"],
        ["c"],
        [
            node("Square", ["a"], ["s"], "call", domain="own"),
            node("ReduceMean", ["s"], ["m"], "mean"),
            node("Sqrt", ["m"], ["c"], "root"),
        ],
        opsets,
    )
    nodes = [node("Norm", ["x"], ["n"], "norm", domain="own"), node("Div", ["x", "n"], ["y"], "d")]
    graph = helper.make_graph(nodes, "functions", [value("x")], [value("y")])
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=[inner, outer])


def contrib() -> onnx.ModelProto:
    """Return a model with operators of ONNX Runtime's own domain."""
    node = helper.make_node
    nodes = [
        node("Gelu", ["x"], ["a"], "gelu", domain="com.microsoft"),
        node("FusedMatMul", ["a", "w"], ["y"], "product", domain="com.microsoft", alpha=0.5),
    ]
    graph = helper.make_graph(
        nodes, "contrib", [value("x")], [value("y")], [weight("w", drawn(8, 4))]
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def sequences() -> onnx.ModelProto:
    """Return a model with a sequence and an optional value."""
    node = helper.make_node
    nodes = [
        node("SplitToSequence", ["x"], ["parts"], "split", axis=1, keepdims=1),
        node("SequenceAt", ["parts", "one"], ["second"], "at"),
        node("SequenceInsert", ["parts", "second"], ["more"], "insert"),
        node("ConcatFromSequence", ["more"], ["y"], "concat", axis=1),
        node("Optional", ["y"], ["maybe"], "optional"),
        node("OptionalGetElement", ["maybe"], ["sure"], "element"),
    ]
    outputs = [
        value("y"),
        value("sure"),
        helper.make_tensor_sequence_value_info("more", FLOAT, None),
    ]
    weights = [weight("one", 1, numpy.int64)]
    return model_of(helper.make_graph(nodes, "sequences", [value("x")], outputs, weights))


MODELS = {
    "convolutions": lambda: conv_net(normalized=False),
    "normalized convolutions": conv_net,
    "quantized": quantized,
    "control flow": control_flow,
    "functions": functions,
    "contrib": contrib,
    "sequences": sequences,
}


def exported(module: Any, *args: Any) -> onnx.ModelProto:
    """Return a module of PyTorch as its exporter writes it."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module.eval(), args, dynamo=True, verbose=False)
    assert program is not None
    found: onnx.ModelProto = program.model_proto
    return found
