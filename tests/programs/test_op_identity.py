"""Op ids: the same in every iteration and process, unique to one op, and bounded in number.

The driver creates ids; these are the programs for which they must be right.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import amanda

from .architectures import ARCHITECTURES, Architecture, Encoder, loss_of
from .tracing import Trace, contexts_of

_BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


# Iterations.


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_ids_are_the_same_in_every_iteration(architecture: Architecture) -> None:
    torch.manual_seed(0)
    model = architecture.build().train()
    feed = architecture.feed()
    tool = Trace()
    with amanda.apply(tool) as handle:
        sequences, contexts = [], []
        for _ in range(3):
            # The same choices of experts in each.
            torch.manual_seed(1)
            torch.autograd.backward(loss_of(model(**feed)))
            sequences.append(tool.take())
            contexts.append(contexts_of(handle))
    assert len(sequences[0]) > 15
    assert sequences[1:] == sequences[:1] * 2
    assert contexts[1:] == contexts[:1] * 2
    assert sorted(tool.analysed) == sorted(set(sequences[0]))


def test_ids_do_not_depend_on_shapes() -> None:
    model = Encoder()
    short, long = (torch.ones(shape, dtype=torch.long) for shape in ((2, 3), (4, 5)))
    tool = Trace()
    with amanda.apply(tool) as handle:
        model(short)
        first, count = tool.take(), contexts_of(handle)
        model(long)
        assert tool.take() == first
        assert contexts_of(handle) == count


def test_ids_do_not_depend_on_tensors_or_tools() -> None:
    found = []
    keep = []
    for _ in range(2):
        model, tool = Encoder(), Trace()
        with amanda.apply(tool):
            model(torch.ones(2, 3, dtype=torch.long))
        found.append(tool.calls)
        keep.append([model, torch.empty(12345)])
    assert found[0] == found[1]


PROGRAM = """
import importlib.util, json, sys
import torch
import amanda

rubbish = [bytearray(n) for n in range(int(sys.argv[2]))]
spec = importlib.util.spec_from_file_location("architectures", sys.argv[1])
architectures = importlib.util.module_from_spec(spec)
sys.modules["architectures"] = architectures
spec.loader.exec_module(architectures)

found = {}
tool = amanda.Tool()

def record(context):
    number = context.get_backward_op_id() if context.is_backward() else context.get_op_id()
    found[str(number)] = context.name

tool.add_inst_for_op(record)
tool.add_inst_for_op(record, backward=True)
weights = [torch.randn(3, 3, requires_grad=True) for _ in range(3)]
with amanda.apply(tool):
    for architecture in architectures.ARCHITECTURES:
        if architecture.name in ("lstm", "unet", "encoder"):
            model = architecture.build()
            output = model(**architecture.feed())
            architectures.loss_of(output).backward()
    x = torch.ones(2, 3)
    for weight in weights:
        x = torch.relu(x @ weight)
    x.sum().backward()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_ids_are_the_same_in_another_process(tmp_path: Path) -> None:
    """With other hashes, other addresses, and the source in another folder."""
    source = Path(__file__).with_name("architectures.py")
    moved = Path(shutil.copy(source, tmp_path / "another_name.py"))
    found = []
    for seed, path in (("1", source), ("2", moved)):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(path), seed + "000"],
            cwd=tmp_path,  # The root's folders are named like packages.
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        )
        found.append(json.loads(done.stdout))
    assert len(found[0]) > 300
    assert found[0] == found[1]


# Branches.


class Skipping(nn.Module):
    """Two equal consecutive ops, written out or in a helper; the first may be skipped."""

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        if both:
            x = torch.sigmoid(x)
        x = torch.sigmoid(x)
        if both:
            x = self.helper(x)
        return self.helper(x)

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


def skip_outside(x: torch.Tensor, both: bool) -> torch.Tensor:
    if both:
        x = torch.sigmoid(x)
    return torch.sigmoid(x)


@pytest.mark.parametrize("first", [True, False])
def test_skipping_an_op_does_not_shift_the_next_ones_id(first: bool) -> None:
    model, x = Skipping(), torch.ones(3)
    tool = Trace()
    calls = {}
    with amanda.apply(tool):
        for both in (first, not first, first):
            model(x, both)
            calls[both] = tool.take()
    assert len(set(calls[True])) == 4
    assert calls[False] == [calls[True][1], calls[True][3]]


@pytest.mark.parametrize("first", [True, False])
def test_skipping_outside_any_module(first: bool) -> None:
    x = torch.ones(3)
    tool = Trace()
    calls = {}
    with amanda.apply(tool):
        for both in (first, not first, first):
            skip_outside(x, both)
            calls[both] = tool.take()
    assert len(set(calls[True])) == 2
    assert calls[False] == calls[True][1:]


class Depth(nn.Module):
    """Stochastic depth: one layer is skipped, of modules and of bare weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.weights = nn.ParameterList(torch.randn(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, skip: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = layer(x)
        for number, weight in enumerate(self.weights):
            if number != skip:
                x = functional.linear(x, weight)
        return x


def test_skipping_a_layer_does_not_shift_the_others() -> None:
    model, tool = Depth(), Trace("linear")
    with amanda.apply(tool):
        model(torch.ones(2, 3), skip=3)
        every = tool.take()
        assert len(set(every)) == 6
        for skip in range(3):
            model(torch.ones(2, 3), skip)
            left = [number for place, number in enumerate(every) if place % 3 != skip]
            assert tool.take() == left


# Loops over weights.

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LAYERS: dict[str, Layer] = {
    "matmul": lambda x, w: x @ w,
    "linear": functional.linear,
    "keyword": lambda x, w: functional.linear(x, weight=w),
    "mul": lambda x, w: torch.mul(x, w),
}


class Looping(nn.Module):
    def __init__(self, weights: Sequence[nn.Parameter], layer: Layer) -> None:
        super().__init__()
        self.weights, self.layer = nn.ParameterList(weights), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = self.layer(x, weight)
        return x


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", ["parameters", "leaves", "module"])
def test_each_layer_of_a_loop_has_its_own_id(kind: str, layer: str) -> None:
    weights = [torch.randn(3, 3, requires_grad=True) for _ in range(4)]
    if kind != "leaves":
        weights = [nn.Parameter(w.detach()) for w in weights]
    run = LAYERS[layer]
    module = Looping([w for w in weights if isinstance(w, nn.Parameter)], run)
    tool = Trace()
    sequences = []
    with amanda.apply(tool):
        for _ in range(3):
            x = torch.ones(3, 3)
            tool.take()
            if kind == "module":
                x = module(x)
            else:
                for weight in weights:
                    x = run(x, weight)
            sequences.append(tool.take())
    assert len(set(sequences[0])) == 4
    assert sequences[1:] == sequences[:1] * 2


def test_weights_made_anew_in_each_step_do_not_make_new_ops() -> None:
    """Updates written as functions: no tensor lives longer than a step."""
    weights = [torch.randn(3, 3, requires_grad=True) for _ in range(3)]
    tool = Trace("linear")
    sequences, counts = [], []
    with amanda.apply(tool) as handle:
        for _ in range(20):
            tool.take()
            x = torch.ones(2, 3)
            for weight in weights:
                x = functional.linear(x, weight)
            grads = torch.autograd.grad(x.square().mean(), weights)
            weights = [
                (w - 0.1 * g).detach().requires_grad_() for w, g in zip(weights, grads, strict=True)
            ]
            del weight, grads, x
            sequences.append(tool.take())
            counts.append(contexts_of(handle))
    assert len(set(sequences[0])) == 3
    assert sequences[1:] == sequences[:1] * 19
    assert counts[-1] == counts[2]


# Modules.


def test_a_module_used_twice_is_one_op_executed_twice() -> None:
    layer = nn.Linear(3, 3)
    model, tool = nn.Sequential(layer, nn.ReLU(), layer), Trace("linear")
    with amanda.apply(tool):
        model(torch.ones(3))
        first, second = tool.take()
        assert first == second
        assert tool.analysed == [first]
        model(torch.ones(3))
        assert tool.take() == [first, first]


def test_two_models_of_one_class_do_not_collide() -> None:
    models = [Depth() for _ in range(3)]
    tool = Trace("linear")
    found = []
    with amanda.apply(tool):
        for _ in range(2):
            for model in models:
                model(torch.ones(3), skip=3)
                found.append(tool.take())
    assert len({number for calls in found for number in calls}) == 3 * 6
    assert found[:3] == found[3:]
    assert len(set(tool.names.values())) == 3 * 6


class Unregistered(nn.Module):
    """A module whose blocks are in a plain list, so that no path leads to them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_modules_in_a_plain_list_do_not_collide() -> None:
    model, x = Unregistered(), torch.ones(3)
    tool = Trace()
    with amanda.apply(tool):
        model(x)
        first = tool.take()
        model(x)
        assert tool.take() == first
    assert len(set(first)) == len(first) == 6


def paths_of(model: nn.Module, *classes: type[nn.Module]) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, classes)]


@pytest.mark.parametrize("name", ["bert", "t5", "vit", "whisper", "clip", "detr"])
def test_names_of_linears_are_their_modules_paths(name: str) -> None:
    architecture = _BY_NAME[name]
    model, tool = architecture.build(), Trace("linear")
    feed = architecture.feed()
    with amanda.apply(tool):
        model(**feed)
    assert sorted(tool.names.values()) == sorted(f"{p}/linear" for p in paths_of(model, nn.Linear))


def test_names_read_like_the_model() -> None:
    model = _BY_NAME["bert"].build()
    base = model.get_submodule("bert")
    tool = Trace()
    with amanda.apply(tool):
        base(input_ids=torch.tensor([[1, 2, 3]]))
    names = list(tool.names.values())
    assert "encoder.layer.1.attention.self.query/linear" in names
    assert "embeddings.word_embeddings/embedding" in names
    assert "encoder.layer.0.output.LayerNorm/layer_norm" in names
    assert len(set(names)) == len(names)


def test_accumulations_are_named_by_parameter() -> None:
    architecture = _BY_NAME["vit"]
    model = architecture.build()
    names: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: names.append(context.name), backward=True)
    with amanda.apply(tool):
        torch.autograd.backward(loss_of(model(**architecture.feed())))
    accumulations = [n.removesuffix(":AccumulateGrad") for n in names if "Accumulate" in n]
    expected = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert sorted(accumulations) == sorted(expected)


class Summed(nn.Module):
    """Operators called inside a builtin of the interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((torch.relu(layer(x)) for layer in self.layers), start=x)


class Parts:
    """A value that is computed on access."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __getitem__(self, key: int) -> torch.Tensor:
        return torch.relu(self.x) * key


class Asked(nn.Module):
    """Operators called inside a subscript, a property and a generator."""

    @property
    def bias(self) -> torch.Tensor:
        return torch.tanh(torch.ones(2))

    def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield torch.sigmoid(x)
        yield torch.cos(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = Parts(x)
        x = parts[2] + parts[3] + self.bias
        for part in self.parts(x):
            x = x + part
        return x


@pytest.mark.parametrize(("kind", "count"), [(Summed, 9), (Asked, 12)])
def test_ids_stay_when_the_interpreter_specialises(kind: type[nn.Module], count: int) -> None:
    seen: list[list[int]] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda c: c.insert_before_op(lambda *v, op_id: seen[-1].append(op_id), op_id=c.get_op_id())
    )
    net, x = kind(), torch.ones(1, 2)
    with amanda.apply(tool):
        for _ in range(60):
            seen.append([])
            net(x)
    assert len(seen[0]) == count
    assert all(ids == seen[0] for ids in seen)
