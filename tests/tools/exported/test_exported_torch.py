"""Models of PyTorch with the edits of tools, as exported programs and in ONNX Runtime."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,no-any-return"

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import amanda
from amanda_core import OpContext
from amanda_core.errors import UnsupportedError
from amanda_tools.prune import Prune, PruneNM
from amanda_tools.quantize import Quantize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.one_interceptor,
    pytest.mark.filterwarnings("ignore:The fused inference path:amanda.AmandaWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Of torch.onnx itself.
]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, image: Any, scale: Any = 1.0) -> Any:
        rows = self.norm(self.conv(image)).relu().flatten(2)
        return {"logits": self.head(self.encoder(rows)) * scale, "shape": tuple(rows.shape)}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return Net().eval()


def under(tool: amanda.Tool, model: Any, *args: Any) -> Any:
    with amanda.apply(tool), torch.no_grad():
        for _ in range(2):  # One to calibrate.
            found = model(*args)
    return found


def ran_by_onnxruntime(program: Any, path: Path, **inputs: Any) -> tuple[list[str], Any]:
    """Return the types of the operators of an exported program, and what they give."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    torch.onnx.export(program, (), path, dynamo=True, verbose=False)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(path, options)
    found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return [node.op_type for node in onnx.load(path).graph.node], found[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Prune(0.5),
        PruneNM,
        Quantize,
        lambda: Quantize("dynamic", ema=0.9),
        lambda: Quantize("lsq+"),
    ],
    ids=["prune", "prune_nm", "quantize", "quantize_ema", "quantize_lsq+"],
)
def test_a_program_gives_what_the_instrumented_model_gives(model: Any, make: Any) -> None:
    image, tool, own = torch.rand(2, 1, 6, 6), make(), model.state_dict()
    own = {name: value.clone() for name, value in own.items()}
    expected, plain = under(tool, model, image), model(image)
    program = amanda.exported(model, tool, image)
    found = program.module()(image)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(plain["logits"], expected["logits"])
    # The model itself is as before, and the tool goes on.
    assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model(image)["logits"], plain["logits"])
    assert torch.equal(under(tool, model, image)["logits"], expected["logits"])
    assert program.state_dict.keys() == own.keys()


def test_a_program_needs_no_amanda_and_has_the_names_of_the_model(
    model: Any, tmp_path: Path
) -> None:
    image, scale, tool = torch.rand(2, 1, 6, 6), torch.tensor(2.0), Prune(0.5)
    expected = under(tool, model, image, scale)
    torch.export.save(amanda.exported(model, tool, image, scale=scale), tmp_path / "net.pt2")
    torch.save({"image": image, "scale": scale}, tmp_path / "inputs.pt")
    script = (
        "import sys, torch\n"
        f"program = torch.export.load({str(tmp_path / 'net.pt2')!r}).module()\n"
        f"inputs = torch.load({str(tmp_path / 'inputs.pt')!r})\n"
        "found = program(inputs['image'], scale=inputs['scale'])\n"
        f"torch.save(found, {str(tmp_path / 'found.pt')!r})\n"
        "assert not any(name.startswith('amanda') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=300)
    found = torch.load(tmp_path / "found.pt")
    assert torch.equal(found["logits"], expected["logits"])


def test_quantized_models_run_in_onnxruntime_bit_for_bit(tmp_path: Path) -> None:
    # All products are multiples of a power of two, so sums are exact in any order.
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 6).eval()
    with torch.no_grad():
        linear.weight.copy_(torch.randint(-126, 127, (6, 8)) / 2**7 + 2**-9)
        linear.weight[:, 0] = 127 / 2**7
        linear.bias.copy_(torch.randint(-9, 9, (6,)) / 4)
    x = torch.randint(0, 4 * 256, (5, 8)) / 2**10
    x[0, :2] = torch.tensor([0.0, 255 / 256])
    tool = Quantize()
    expected = under(tool, linear, x)
    program = amanda.exported(linear, tool, x)
    types, found = ran_by_onnxruntime(program, tmp_path / "net.onnx", input=x)
    assert types.count("QuantizeLinear") == types.count("DequantizeLinear") == 2
    assert np.array_equal(found, expected.numpy())
    assert not torch.equal(linear(x), expected)


@pytest.mark.parametrize(
    "make",
    [lambda: Prune(0.5), lambda: Quantize(weights="int4", activations="int4")],
    ids=["prune", "int4"],
)
def test_models_run_in_onnxruntime(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x, tool = torch.rand(3, 8), make()
    expected = under(tool, model, x)
    program = amanda.exported(model, tool, x)
    types, found = ran_by_onnxruntime(program, tmp_path / "net.onnx", input=x)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-6)
    assert ("QuantizeLinear" in types) == isinstance(tool, Quantize)


def test_what_only_the_host_can_run_is_refused_by_name(model: Any) -> None:
    def double(value: Any) -> Any:
        return value * 2

    def analyse(context: OpContext) -> None:
        if context.op_type == "linear":
            context.insert_before_op(double, inputs=[0])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    image = torch.rand(2, 1, 6, 6)
    with pytest.raises(UnsupportedError, match=r"double.*linear.*amanda\.staged"):
        amanda.exported(model, tool, image)
    with pytest.raises(UnsupportedError, match=r"cannot be exported.*branch"):
        amanda.exported(lambda x: x + 1 if x.sum() > 0 else x, Prune(0.5), torch.ones(2))


def test_observers_are_left_out(model: Any) -> None:
    def analyse(context: OpContext) -> None:
        context.insert_before_op(lambda *values: seen.append(1), observe=True)

    seen: list[int] = []
    tool, image = amanda.Tool(), torch.rand(2, 1, 6, 6)
    tool.add_inst_for_op(analyse)
    program = amanda.exported(model, [tool, Prune(0.5)], image)
    assert torch.equal(program.module()(image)["logits"], under(Prune(0.5), model, image)["logits"])
    assert not seen


def test_operators_of_long_functions_are_the_same_compiled() -> None:
    """Dynamo numbers instructions of long functions otherwise than the interpreter does."""
    keys: dict[str, set[Any]] = {"eager": set(), "compiled": set()}

    def analyse(context: OpContext) -> None:
        if context["type"] == "add":
            keys[context.namespace.rpartition("/")[2]].add(context.site.key)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    tool.whole = True
    layer, x = (
        torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(),
        torch.rand(2, 8, 16),
    )
    with amanda.apply(tool), torch.no_grad():
        layer(x)
    amanda.exported(layer, tool, x)
    assert keys["eager"] == keys["compiled"]
    assert len(keys["eager"]) == 2
