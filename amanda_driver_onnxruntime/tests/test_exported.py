"""Models that PyTorch exported: paths, source lines, types, and their comparison with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy
import onnx
import onnxruntime
import pytest

import amanda
from amanda_core.driver_kit import OpContext
from amanda_tools.diff import compare
from amanda_tools.dump import Dump

from .models import conv_net, exported
from .onnxruntime_backends import options

#: What PyTorch's exporter writes about a node.
METADATA = {
    "pkg.torch.onnx.class_hierarchy": "['__main__.Net', 'own.Block', "
    "'torch.nn.modules.linear.Linear', 'aten.linear.default']",
    "pkg.torch.onnx.name_scopes": "['', 'layers.1', 'layers.1.fc', 'linear']",
    "pkg.torch.onnx.fx_node": "%linear : [num_users=1] = call_function"
    "[target=torch.ops.aten.linear.default](args = (%x, %w), kwargs = {})",
    "pkg.torch.onnx.stack_trace": 'File "/models/net.py", line 10, in forward\n'
    "    x = self.layers(x)\n"
    '  File "/models/block.py", line 77, in forward\n    return self.fc(x)\n'
    '  File "/usr/lib/python3/site-packages/torch/nn/modules/linear.py", line 134, in forward\n',
}


def described(model: onnx.ModelProto, op_type: str, metadata: dict[str, str]) -> OpContext:
    """Run a model whose operators of a type have metadata; return the context of the first one."""
    for node in model.graph.node:
        if node.op_type == op_type:
            for key, text in metadata.items():
                node.metadata_props.add(key=key, value=text)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options(0))
    found: list[Any] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(found.append)
    with amanda.apply(tool):
        session.run(None, {"x": numpy.zeros((1, 3, 8, 8), numpy.float32)})
    context: OpContext = next(one for one in found if one.op_type == op_type)
    return context


def test_what_an_exporter_wrote() -> None:
    context = described(conv_net(), "Gemm", METADATA)
    assert context.name == "layers.1.fc/Gemm"
    assert context.module_path == "layers.1.fc"
    assert context.source == "block.py:77"
    assert context["type"] == "linear"


@pytest.mark.parametrize("text", ["", "[", "3", "__import__('os').abort()"])
def test_metadata_in_another_form_is_ignored(text: str) -> None:
    context = described(conv_net(), "Gemm", dict.fromkeys(METADATA, text))
    assert context.module_path == "fc"  # That is in the name of the node.
    assert context.source is None


def test_names_of_older_exporters() -> None:
    model = conv_net()
    model.graph.node[0].name = "/layer1/layer1.0/conv1/Conv"
    assert described(model, "Conv", {}).name == "layer1.0.conv1/Conv"


@pytest.mark.slow
def test_each_linear_and_convolution_has_its_counterpart_in_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="it is compared with")
    pytest.importorskip("onnxscript", reason="PyTorch exports with it")
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.fc, self.embed = nn.Linear(4, 5), nn.Embedding(7, 4)

        def forward(self, x: Any, rows: Any) -> Any:
            pooled = torch.relu(self.norm(self.conv(x))).mean((2, 3))
            return self.fc(pooled[:, None] + self.embed(rows))

    torch.manual_seed(0)
    module = nn.Sequential(Block())[0].eval()
    x, rows = torch.randn(2, 3, 8, 8), torch.tensor([[0, 3, 6], [1, 1, 2]])
    model = exported(module, x, rows)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options(0))
    names = [one.name for one in session.get_inputs()]
    dumps = [Dump(values=["outputs"]) for _ in range(2)]
    with amanda.apply(dumps[0]), torch.no_grad():
        module(x, rows)
    with amanda.apply(dumps[1]):
        session.run(None, dict(zip(names, (x.numpy(), rows.numpy()), strict=True)))
    one, other = (dump.result().open() for dump in dumps)
    found = compare(one, other, rtol=1e-4, atol=1e-5)
    assert found.same
    assert {"conv2d", "linear", "embedding"} <= {pair.a.word for pair in found.compared}
