"""Weights as operators read them, in files that a process without Amanda loads."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core.cli.progress import Progress
from amanda_core.errors import ToolError
from amanda_tools.faults import InjectFaults
from amanda_tools.kit.weights.baking_tool import BakingTool
from amanda_tools.kit.weights.tool import WeightTool
from amanda_tools.prune import Prune, PruneNM
from amanda_tools.quantize import Quantize
from amanda_tools.rewriting import Rewrite
from amanda_tools.steer import Steer

load_file = pytest.importorskip("safetensors.torch").load_file

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.filterwarnings("ignore:.*without the changes of"),
]

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.tied, self.unused, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.last(self.tied(torch.relu(self.first(self.norm(x)))))

def values():
    return torch.linspace(-1, 1, 48).reshape(6, 8)
"""

names: dict[str, Any] = {"__name__": "home"}
exec(MODEL, names)

LINEAR: dict[str, Any] = {"ops": ["linear"], "value": "inputs", "operand": 1}

TOOLS: dict[str, Callable[[], WeightTool]] = {
    "prune": lambda: Prune(0.5),
    "global": lambda: Prune(0.5, scope="global"),
    "nm": lambda: PruneNM(2, 4),
    "int4": lambda: Quantize(weights="int4", activations="none"),
    "fp8": lambda: Quantize("dynamic", weights="fp8_e4m3", activations="none"),
}


RESTRICTED: dict[str, Callable[[], BakingTool]] = {
    "prune": lambda: Prune(0.5),
    "steer": lambda: Steer("scale", factor=0.5, **LINEAR),
}


def trained(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = names["Net"]().to(dtype)
    net(names["values"]().to(dtype))
    return net.eval()


def apart(folder: Path, dtype: torch.dtype) -> Any:
    """Return what the model computes with the files in a process that cannot import Amanda."""
    program = f"""{MODEL}
import sys
from safetensors.torch import load_file
net = Net().to({dtype})
net.load_state_dict(load_file({str(folder / "weights.safetensors")!r}))
out = net.eval()(values().to({dtype}))
torch.save([out, list(sys.modules)], {str(folder / "out.pt")!r})
"""
    subprocess.run([sys.executable, "-I", "-c", program], check=True)
    out, modules = torch.load(folder / "out.pt")
    assert not any(name.partition(".")[0].startswith("amanda") for name in modules)
    return out


#: Each starts a process, so the fast tests have two.
SAMPLE = [("prune", torch.float32), ("int4", torch.bfloat16)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.slow] * ((name, dtype) not in SAMPLE))
        for name in TOOLS
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_a_process_without_amanda_computes_the_same(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    net, tool, x = trained(dtype), TOOLS[name](), names["values"]().to(dtype)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with amanda.apply(tool), torch.no_grad():
        net(x)
        expected = net(x)
    files = tool.save_baked(tmp_path)
    assert sorted(file.name for file in files if file.parent == tmp_path) == [
        "state.safetensors",
        "weights.json",
        "weights.safetensors",
    ]
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])
    saved = load_file(tmp_path / "weights.safetensors")
    assert saved.keys() == before.keys()
    changed = ["first.weight", "tied.weight", "last.weight"]
    about = json.loads((tmp_path / "weights.json").read_text())["models"]["Net"]
    assert about["changed"] == changed
    for key, value in saved.items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key]) == (key not in changed)
    assert not torch.equal(net(x), expected)
    assert torch.equal(apart(tmp_path, dtype), expected)
    other = TOOLS[name]()
    other.load(tmp_path / "state.safetensors")


def test_bake_writes_into_the_given_model_only() -> None:
    one, two, tool = nn.Linear(8, 4), nn.Linear(8, 4), Prune(0.5)
    with amanda.apply(tool):
        one(torch.ones(1, 8))
        two(torch.ones(1, 8))
    assert tool.bake(one) == ["weight"]
    assert int((one.weight == 0).sum()) == 16
    assert int((two.weight == 0).sum()) == 0
    assert tool.has_baked


def test_several_models_have_a_file_each(tmp_path: Path) -> None:
    one, two, tool = nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 2)), Prune(0.5)
    with amanda.apply(tool):
        two(one(torch.ones(1, 8)))
    tool.save_baked(tmp_path)
    assert load_file(tmp_path / "weights-Linear.safetensors")["weight"].shape == (4, 8)
    assert load_file(tmp_path / "weights-Sequential.safetensors")["0.weight"].shape == (2, 4)


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    tool = Prune(0.5)
    with pytest.raises(ToolError, match="no weights that the tool has changed"):
        tool.save_baked(tmp_path)
    with amanda.apply(tool):
        nn.Linear(8, 4)(torch.ones(1, 8))
    with pytest.raises(ToolError, match="weight cannot be saved: its model is gone"):
        tool.save_baked(tmp_path)
    with pytest.raises(ToolError, match="has no weights that the tool has changed"):
        tool.bake(nn.Linear(2, 2))
    with pytest.raises(ToolError, match="int has no parameters that can be listed"):
        tool.bake(3)
    tied, table = Prune(0.5), nn.Embedding(6, 4)
    with amanda.apply(tied):
        table(torch.arange(6)) @ table.weight.T
    with pytest.raises(ToolError, match="also reads weights unchanged"):
        tied.save_baked(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_saves_the_weights_of_a_model_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"{MODEL}\n"
        "def main():\n"
        "    torch.manual_seed(0)\n"
        "    net = Net()\n"
        "    net(values())\n"
        "    torch.save(net.state_dict(), 'own.pt')\n"
        "main()\n"
    )
    amanda_ = Path(sys.executable).with_name("amanda")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(amanda_), "run", *arguments, "train.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run("-t", "prune:sparsity=0.5,save=pruned")
    assert done.returncode == 0, done.stderr
    words = "a checkpoint that your program saved has the unpruned weights; the pruned ones are in"
    assert f"prune: {words} pruned\n" in done.stderr
    assert "use what is written to pruned at the end" in done.stderr
    own, saved = torch.load(tmp_path / "own.pt"), load_file(tmp_path / "pruned/weights.safetensors")
    assert own.keys() == saved.keys()
    assert not (own["last.weight"] == 0).any()
    mask = saved["last.weight"] != 0
    assert int(mask.sum()) == 16
    assert torch.equal(saved["last.weight"], own["last.weight"] * mask)
    assert torch.equal(saved["norm.running_mean"], own["norm.running_mean"])
    done = run("-t", "prune:sparsity=0.5", "-o", "again")
    assert "the option save=FOLDER writes the pruned ones" in done.stderr
    done = run("-t", "trace:save=folder", "-o", "third")
    assert done.returncode != 0
    assert "has no option 'save'" in done.stderr


EDITS: dict[str, Callable[[], BakingTool]] = {
    "scale": lambda: Steer("scale", factor=2.0, neurons=[0, 2], **LINEAR),
    "project": lambda: Steer("project", vector=[0.5, 1, 2, 1, 0, 3, 1, 1], **LINEAR),
    "flips": lambda: InjectFaults(["linear"], site="weight", rate=0.1, bits="mantissa"),
    "noise": lambda: InjectFaults(
        ["linear"], site="weight", mode="per_layer", model="noise", count=5
    ),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_of_weights_are_written_as_operators_read_them(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, tool = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype), EDITS[name]()
    other, x = copy.deepcopy(net), torch.rand(3, 8).to(dtype)
    with amanda.apply(tool), torch.no_grad():
        net(x)
        expected = net(x)
    files = tool.save_baked(tmp_path)
    assert [file.name for file in files] == ["weights.safetensors", "weights.json"]
    about = json.loads((tmp_path / "weights.json").read_text())
    assert about["models"]["Sequential"]["changed"] == ["0.weight", "2.weight"]
    assert not torch.equal(net(x), expected)
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert torch.equal(other(x), expected)
    assert tool.bake(net) == ["0.weight", "2.weight"]
    assert torch.equal(net(x), expected)


def test_replayed_faults_are_written() -> None:
    net, x = nn.Linear(4, 3), torch.rand(2, 4)
    first = InjectFaults(["linear"], site="weight", mode="per_layer", bits=[23])
    with amanda.apply(first):
        expected = net(x)
    again = InjectFaults(["linear"], site="weight", replay=first.result().faults)
    with amanda.apply(again):
        net(x)
    assert again.bake(net) == ["weight"]
    assert torch.equal(net(x), expected)


class Transposed(nn.Module):
    """Reads one weight along other axes than it has, and part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.stack = nn.Parameter(torch.rand(5, 4)), nn.Parameter(torch.rand(2, 5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turned.T @ self.stack[1]


@pytest.mark.parametrize(
    "tool",
    [
        Steer("ablate", neurons=[1, 3], ops=["matmul"], value="inputs", operand=1),
        InjectFaults(["matmul"], site="weight", mode="per_layer", count=4, model="noise"),
    ],
)
def test_edits_are_written_into_the_part_that_an_operator_reads(tool: BakingTool) -> None:
    net, x = Transposed(), torch.rand(3, 4)
    before = net.stack.detach().clone()
    with amanda.apply(tool), torch.no_grad():
        expected = net(x)
    assert tool.bake(net) == ["turned", "stack"]
    assert torch.equal(net(x), expected)
    assert torch.equal(net.stack[0], before[0])
    assert not torch.equal(net.stack[1], before[1])


def test_edits_that_are_in_no_weight_are_refused_by_name(tmp_path: Path) -> None:
    net = names["Net"]().eval()
    activations = [Steer("scale", factor=2.0, modules=["first"]), InjectFaults(rate=0.1)]
    mixed = Steer("scale", factor=2.0, ops=["linear", "relu"], value="inputs")
    tied = Steer("scale", factor=2.0, ops=["first/linear"], value="inputs", operand=1)
    differ = InjectFaults(["linear"], site="weight", mode="per_layer")
    with amanda.apply(*activations, mixed, tied, differ):
        net(names["values"]())
    for tool, told in (
        (activations[0], "Steer changes activations with these options: that is in no weight"),
        (activations[1], "changes activations, as site=output says: that is in no weight"),
        (mixed, "changes input 0 of first/linear: that is in no weight"),
        (tied, "first.weight .64, also read by tied/linear, where it is not changed"),
        (differ, "first.weight .64, changed differently for first/linear and tied/linear"),
    ):
        with pytest.raises(ToolError, match=told):
            tool.bake(net)
        with pytest.raises(ToolError, match=told):
            tool.save_baked(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for tool in (*activations, mixed):
        assert not tool.has_baked


@pytest.mark.parametrize("name", RESTRICTED)
def test_a_tied_weight_that_a_selection_leaves_out_is_refused(name: str) -> None:
    net, x = trained(torch.float32), names["values"]()
    tool = RESTRICTED[name]().where(amanda.select(module="first"))
    with torch.no_grad(), amanda.apply(tool):
        net(x)
    with pytest.raises(ToolError, match=r"also read by tied/linear, which where\(\) leaves out"):
        tool.bake(net)
    net, tool = trained(torch.float32), RESTRICTED[name]().where(amanda.select(module="last"))
    with torch.no_grad():
        with amanda.apply(tool):
            under = net(x)
        assert tool.bake(net) == ["last.weight"]
        assert torch.equal(net(x), under)


@pytest.mark.parametrize("name", RESTRICTED)
@pytest.mark.parametrize("chosen", [{"steps": [0]}, {"calls": [0]}], ids=["steps", "calls"])
def test_a_change_in_some_steps_or_calls_is_refused(name: str, chosen: dict[str, Any]) -> None:
    net, tool = trained(torch.float32), RESTRICTED[name]().where(amanda.select(**chosen))
    with torch.no_grad(), amanda.apply(tool):
        net(names["values"]())
    assert not tool.has_baked
    with pytest.raises(ToolError, match="in some steps or calls only"):
        tool.bake(net)


#: The tools under which a checkpoint of the program lacks something, with options that they need.
EDITORS: dict[str, dict[str, Any]] = {
    "inject_faults": {"rate": 0.1},
    "prune": {"sparsity": 0.5},
    "prune_attention": {},
    "prune_channels": {},
    "prune_nm": {},
    "prune_positions": {},
    "prune_tiles": {"sparsity": 0.5},
    "quantize": {},
    "rewrite": {"rules": ["conv_bn"]},
    "steer": {"edit": "scale", "modules": "*", "factor": 0.5},
}
OBSERVERS: dict[str, dict[str, Any]] = {"capture": {"modules": "*"}}


@pytest.mark.parametrize("entry", entry_points(group="amanda.tools"), ids=lambda entry: entry.name)
def test_a_program_that_saves_is_warned_of_tools_that_edit(entry: EntryPoint) -> None:
    """Also before such a tool has found an operator, and in graphs, where none is analysed."""
    edits = entry.name in EDITORS
    tool = entry.load()(**(EDITORS if edits else OBSERVERS).get(entry.name, {}))
    model = nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as told, amanda.apply(tool, Progress(print)):
        warnings.simplefilter("always")
        model.state_dict()
    warned = [str(one.message) for one in told if "without the changes of" in str(one.message)]
    assert len(warned) == edits
    assert not any("Progress" in one for one in warned)


@pytest.mark.parametrize("tool", [InjectFaults, Rewrite])
def test_tools_that_were_given_nothing_to_do_do_not_warn(tool: type[amanda.Tool]) -> None:
    with warnings.catch_warnings(), amanda.apply(tool()):
        warnings.simplefilter("error")
        nn.Linear(2, 2).state_dict()
