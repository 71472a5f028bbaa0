"""A builder of ONNX graphs, as a user writes one by hand: the nodes get no names of modules."""

from __future__ import annotations

from typing import Any

import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

__all__ = ["Graph"]


class Graph:
    """Collects nodes and weights. An array among the inputs becomes a weight."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def __call__(self, kind: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Add an operator; return the name of what it writes, or their names."""
        names = [self._name(one) for one in inputs]
        made = [f"{kind}_{len(self.nodes)}_{number}" for number in range(outputs)]
        self.nodes.append(
            helper.make_node(kind, names, made, name=f"{kind}_{len(self.nodes)}", **attributes)
        )
        return made[0] if outputs == 1 else made

    def _name(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        array = numpy.asarray(value)
        if array.dtype == numpy.float64:
            array = array.astype(numpy.float32)
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def session(self, output: str, **inputs: tuple[int, ...]) -> onnxruntime.InferenceSession:
        """Return a session; inputs are of float32, or of int64 if their names end in ``ids``."""
        types = {
            name: TensorProto.INT64 if name.endswith("ids") else TensorProto.FLOAT
            for name in inputs
        }
        model = helper.make_model(
            helper.make_graph(
                self.nodes,
                "port",
                [helper.make_tensor_value_info(n, types[n], s) for n, s in inputs.items()],
                [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
                self.weights,
            ),
            opset_imports=[helper.make_opsetid("", 20)],
            ir_version=10,
        )
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
