"""Each tool that edits: what it saves and exports runs without Amanda, or is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from taking_out import OF_ACTIVATIONS, PORTABLE, Row, quantized, refused, running_apart
from torch import nn

import amanda
from amanda_tools.steer import Steer

pytest.importorskip("safetensors")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.one_interceptor,
    pytest.mark.filterwarnings("ignore:.*without the changes of"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Of torch.onnx itself.
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
        self.hidden, self.head = nn.Linear(32, 16), nn.Linear(16, 8)

    def forward(self, image: Any) -> Any:
        rows = self.norm(self.conv(image)).relu().flatten(1)
        return self.head(torch.relu(self.hidden(rows)))


#: Runs in a process of its own: gets a folder a line, and writes what the files in it compute.
APART = f"""
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

{inspect.getsource(Net)}

sys.modules.update(dict.fromkeys(("amanda", "amanda_core", "amanda_tools", "amanda_driver_torch")))
try:
    import amanda_core
except ImportError:
    print("apart", flush=True)

def run(folder):
    image = torch.load(folder / "image.pt")
    if (folder / "baked").exists():
        net = Net().eval()
        net.load_state_dict(load_file(folder / "baked/weights.safetensors"))
        yield "baked", net(image)
    if (folder / "net.pt2").exists():
        yield "exported", torch.export.load(folder / "net.pt2").module()(image)

for line in sys.stdin:
    folder = Path(line.strip())
    try:
        with torch.no_grad():
            torch.save(dict(run(folder)), folder / "found.pt")
        print("done", flush=True)
    except Exception as error:
        print(repr(error)[:500], flush=True)
"""


POSITIONS = "Positions and rows are those of one call"

TABLE: dict[str, Row] = {
    **PORTABLE,
    "quantize lsq": quantized("lsq"),
    "quantize lsq+": quantized("lsq+"),
    "quantize tqt": quantized("tqt"),
    "quantize operands lsq": quantized("lsq", activations="int8"),
    "quantize operands lsq+": quantized("lsq+", activations="int8"),
    "quantize operands tqt": quantized("tqt", activations="int8"),
    "steer add": Row(lambda: Steer("add", [0.1] * 16, modules=["hidden"]), OF_ACTIVATIONS),
    "steer project": Row(lambda: Steer("project", [1, 2] * 8, modules=["hidden"]), OF_ACTIVATIONS),
    "steer replace": Row(lambda: Steer("replace", [0.5] * 8, modules=["head"]), OF_ACTIVATIONS),
    "steer input": Row(
        lambda: Steer("ablate", modules=["head", "hid*"], value="inputs", heads=[1], of_heads=2),
        OF_ACTIVATIONS,
    ),
    "steer rows": Row(
        lambda: Steer("ablate", modules=["conv"], value="inputs", rows="0"),
        OF_ACTIVATIONS,
        POSITIONS,
    ),
}


@pytest.fixture(scope="module")
def apart() -> Iterator[Callable[[Path], Any]]:
    """Return a function that returns what the files in a folder compute without Amanda."""
    with running_apart(APART, lambda folder: torch.load(folder / "found.pt")) as run:
        yield run


@pytest.mark.parametrize("name", TABLE)
def test_what_is_taken_out_gives_what_the_instrumented_model_gave(
    name: str, apart: Callable[[Path], Any], tmp_path: Path
) -> None:
    make, unsaved, unexported = TABLE[name]
    torch.manual_seed(0)
    net: nn.Module = Net().eval()
    image, tool = torch.rand(3, 4, 4, 4), make()
    torch.save(image, tmp_path / "image.pt")
    own = {key: value.clone() for key, value in net.state_dict().items()}
    with amanda.apply(tool), torch.no_grad():
        net(image)  # Ranges are known after it.
        expected = net(image)
    plain = net(image)
    if unsaved == "activations":
        pass  # Only the weights of it can be saved: see the rows without activations.
    elif unsaved:
        refused(lambda: tool.save_baked(tmp_path / "baked"), unsaved)
    else:
        tool.save_baked(tmp_path / "baked")
    if unexported:
        refused(lambda: amanda.exported(net, tool, image), unexported)
    else:
        assert not torch.equal(plain, expected)
        program = amanda.exported(net, tool, image)
        torch.export.save(program, tmp_path / "net.pt2")
        found = on_onnxruntime(program, tmp_path, image)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)
    for what, value in apart(tmp_path).items():
        assert torch.equal(value, expected), what
    # The model is as before, and the tool goes on.
    assert all(torch.equal(own[key], value) for key, value in net.state_dict().items())
    assert torch.equal(net(image), plain)
    if not (unsaved or unexported):
        tool.bake(net)
        assert torch.equal(net(image), expected)


def on_onnxruntime(program: Any, folder: Path, image: Any) -> Any:
    """Return what ONNX Runtime computes of an exported program, without optimizations."""
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    torch.onnx.export(program, (), folder / "net.onnx", dynamo=True, verbose=False)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(folder / "net.onnx", options)
    return session.run(None, {"image": image.numpy()})[0]


def test_the_operators_of_an_exported_program_have_the_ids_of_the_model() -> None:
    """They have them although the tool has seen the model itself before."""
    found: dict[str, list[int]] = {"eager": [], "compiled": []}

    def analyse(context: amanda.OpContext) -> None:
        found[context.namespace.rpartition("/")[2]].append(context.get_op_id())

    net, image, tool = Net().eval(), torch.rand(3, 4, 4, 4), amanda.Tool()
    tool.show_modules(["*"], inputs=True, outputs=True)
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool), torch.no_grad():
        net(image)
    amanda.exported(net, tool, image)
    assert found["eager"] == found["compiled"]
    assert len(found["eager"]) == len({*found["eager"]}) == 17
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_a_function_that_calls_modules_is_refused_if_a_tool_chooses_modules() -> None:
    net, image = Net().eval(), torch.rand(3, 4, 4, 4)
    tool = Steer("scale", factor=2.0, modules=["hidden"])
    refused(lambda: amanda.exported(lambda x: net(x), tool, image), "a tool chooses modules")
