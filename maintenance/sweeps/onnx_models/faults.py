"""Faults in an exported model, and whether `amanda diff` names them with PyTorch's line.

Owns the faults. Each changes one operator of the exported model, or one of its weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import onnx
import onnxruntime
from onnx import helper, numpy_helper

import amanda
from amanda_tools.diff import compare
from amanda_tools.dump import Dump

from .models import exported

__all__ = ["FAULTS", "found"]

#: Changes a model.
Fault = Callable[[onnx.ModelProto], None]
_SOURCE = Path(__file__).with_name("network.py")


def _node(model: onnx.ModelProto, output: str) -> onnx.NodeProto:
    found: onnx.NodeProto = next(node for node in model.graph.node if output in node.output)
    return found


def _weight(output: str, place: int, edit: Callable[[Any], Any]) -> Fault:
    """Return the fault that edits a weight of the operator that computes a value."""

    def plant(model: onnx.ModelProto) -> None:
        name = _node(model, output).input[place]
        one = next(one for one in model.graph.initializer if one.name == name)
        array = numpy.ascontiguousarray(edit(numpy_helper.to_array(one)))
        one.CopyFrom(numpy_helper.from_array(array, name))

    return plant


def _attribute(output: str, name: str, value: Any) -> Fault:
    """Return the fault that sets an attribute."""

    def plant(model: onnx.ModelProto) -> None:
        node = _node(model, output)
        kept = [one for one in node.attribute if one.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return plant


def _without_mask(model: onnx.ModelProto) -> None:
    node = _node(model, "masked_fill")
    scores = next(name for name in node.input if name == "mul")
    node.op_type, node.input[:] = "Identity", [scores]


def _leaky(model: onnx.ModelProto) -> None:
    _node(model, "relu").op_type = "LeakyRelu"


def _product(model: onnx.ModelProto, output: str) -> str:
    """Return the name of the product to which a linear layer adds its bias."""
    found: str = next(one for one in _node(model, output).input if one.startswith("val_"))
    return found


def _transposed(model: onnx.ModelProto) -> None:
    _weight(_product(model, "linear_3"), 1, numpy.transpose)(model)


def _halved(model: onnx.ModelProto) -> None:
    edit = lambda w: w.astype(numpy.float16).astype(w.dtype)  # noqa: E731  It has no name.
    _weight(_product(model, "linear_2"), 1, edit)(model)


#: Fault, which marks a line of the network -> how it is planted.
FAULTS: Mapping[str, Fault] = {
    "kernel": _weight("conv2d", 1, lambda w: w.swapaxes(2, 3)),
    "activation": _leaky,
    "padding": _attribute("conv2d_1", "pads", [0, 0, 2, 2]),
    "slope": _weight("prelu", 1, lambda w: w * 2),
    "pool": _attribute("avg_pool2d", "count_include_pad", 0),
    "epsilon": _attribute("layer_norm", "epsilon", 1e-2),
    "row": _weight("embedding", 0, lambda w: numpy.roll(w, 1, 0)),
    "bias": _weight("linear_1", 1, lambda b: 0 * b),
    "dtype": _halved,
    "scale": _weight("mul", 1, lambda s: 0 * s + 1),
    "mask": _without_mask,
    "axis": _attribute("softmax", "axis", 1),
    "transposed": _transposed,
    "gelu": _attribute("gelu", "approximate", "tanh"),
}


def line_of(fault: str) -> str:
    """Return the line of the network that a fault is planted at, as ``network.py:30``."""
    for number, line in enumerate(_SOURCE.read_text().splitlines(), 1):
        if line.endswith(f"# {fault}"):
            return f"{_SOURCE.name}:{number}"
    raise KeyError(fault)


def found() -> dict[str, tuple[str, bool]]:
    """Return what `amanda diff` says of each fault, and whether it names the right line.

    Without a fault, under the name ``none``, nothing may differ.
    """
    import torch

    from .network import Network, inputs

    torch.manual_seed(0)
    case = exported(Network(), *inputs())
    assert case.module is not None
    module, args = case.module
    told: dict[str, tuple[str, bool]] = {}
    for fault in ("none", *FAULTS):
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        if fault != "none":
            FAULTS[fault](model)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        dumps = [Dump(values=["inputs", "weights", "outputs"]) for _ in range(2)]
        with amanda.apply(dumps[0]), torch.no_grad():
            module(*args)
        with amanda.apply(dumps[1]), warnings.catch_warnings():
            session.run(None, case.inputs)
        one, other = (dump.result().open() for dump in dumps)
        result = compare(one, other)
        if fault == "none":
            told[fault] = ("" if result.first is None else str(result.first), result.same)
            continue
        first = result.first
        assert first is not None, fault
        # An operator that was replaced by one of another type has no counterpart.
        named = result.suspects[0] if result.suspects else first.a
        told[fault] = (named.name, str(named.source).endswith(line_of(fault)))
    return told
