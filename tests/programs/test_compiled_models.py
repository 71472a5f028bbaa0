"""Models that stay compiled under tools: Inductor's programs against plain ones."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from stays_compiled import STAYS_COMPILED
from torch import nn
from torch._dynamo.utils import counters

import amanda

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.slow,
    STAYS_COMPILED,
]

STEPS = 5
IDS = torch.arange(8)[None]


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    config = BertConfig(**size, num_hidden_layers=1, num_attention_heads=2)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertModel(config)


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetModel

    size: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    return ResNetModel(ResNetConfig(**size, layer_type="basic"))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    size: dict[str, Any] = {"n_embd": 16, "n_positions": 16, "vocab_size": 64, "n_layer": 1}
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**size, **ends, n_head=2, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2Model(config)


def mixtral(experts: str) -> nn.Module:
    from transformers import MixtralConfig, MixtralModel

    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(**size, **heads, num_hidden_layers=1, num_local_experts=2)
    config.num_experts_per_tok, config.use_cache = 1, False
    config._experts_implementation = experts
    return MixtralModel(config)


class Noise(NamedTuple):
    """The prediction of a diffusion model, under the name that the other models have for it."""

    last_hidden_state: torch.Tensor


class UNet(nn.Module):
    """A diffusion model's U-Net with a level: blocks told of the time, attention, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.first = nn.Linear(8, 8), nn.Conv2d(3, 8, 3, padding=1)
        self.down, self.inner = nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.attend = nn.Linear(8, 24)
        self.last = nn.Conv2d(16, 3, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Noise:
        angles = torch.arange(4.0, device=x.device).exp() * 0.1
        told = F.silu(self.time(torch.cat([angles.sin(), angles.cos()])))
        first = F.silu(self.norms[0](self.first(x)))
        low = F.silu(self.norms[1](self.inner(self.down(first)) + told[:, None, None]))
        tokens = low.flatten(2).transpose(1, 2)
        tokens = tokens + F.scaled_dot_product_attention(*self.attend(tokens).chunk(3, -1))
        low = tokens.transpose(1, 2).reshape(low.shape)
        up = F.interpolate(low, scale_factor=2.0, mode="nearest")
        return Noise(self.last(torch.cat([up, first], 1)))


class Compiled(NamedTuple):
    """A model, and how it is compiled.

    Attributes:
        make: Makes it.
        backend: The backend.
        is_whole: Whether plain torch compiles it as one graph.
    """

    make: Callable[[], nn.Module]
    backend: str = "inductor"
    is_whole: bool = True


MODELS = {
    "bert": Compiled(bert),
    "resnet": Compiled(resnet),
    "gpt2-aot": Compiled(gpt2, "aot_eager"),
    "unet-aot": Compiled(UNet, "aot_eager"),
    "unet": Compiled(UNet),
    "mixtral-batched-aot": Compiled(lambda: mixtral("batched_mm"), "aot_eager"),
    "mixtral-loop-aot": Compiled(lambda: mixtral("eager"), "aot_eager", is_whole=False),
    "gpt2": Compiled(gpt2),
    "mixtral-batched": Compiled(lambda: mixtral("batched_mm")),
    "mixtral-grouped": Compiled(lambda: mixtral("grouped_mm")),
    "mixtral-loop": Compiled(lambda: mixtral("eager"), is_whole=False),
}
#: A minute of a processor each, most of it in a C++ compiler.
LONG = ("gpt2", "unet", "mixtral-batched", "mixtral-grouped", "mixtral-loop")
OTHER_OPERATOR = pytest.mark.xfail(
    raises=AssertionError,
    strict=True,
    reason="while it is compiled, the model calls transformers::grouped_mm_fallback",
)
EACH = [
    pytest.param(
        name,
        marks=[pytest.mark.exhaustive] * (name in LONG)
        + [OTHER_OPERATOR] * (name == "mixtral-grouped"),
    )
    for name in MODELS
]
# Otherwise the models make it, by other operators where `torch.compiler.is_compiling()`.
MASK = torch.full((8, 8), float("-inf")).triu(1)[None, None]


@pytest.fixture(autouse=True)
def _graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Counting(amanda.Tool):
    """Counts the runs of a routine on the host at every operator, forward and backward.

    Attributes:
        forward: Type of an operator -> how often routines ran before it.
        backward: The same for the gradients of its outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        kind = context.op_type
        context.insert_before_op(lambda *_: self.forward.update([kind]), observe=True)
        context.insert_before_backward_op(lambda *_: self.backward.update([kind]), observe=True)


def feed(model: nn.Module) -> torch.Tensor:
    is_image = "Net" in type(model).__name__
    return torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16) if is_image else IDS


def step(
    model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], training: bool = True
) -> list[torch.Tensor]:
    """Return the output and the gradients of a training step, or the output alone."""
    if not training:
        with torch.no_grad():
            return [call(feed(model)).clone()]
    model.zero_grad()
    output = call(feed(model))
    output.square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [output.detach().clone(), *(gradient.clone() for gradient in gradients)]


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def breaks() -> int:
    return sum(counters["graph_break"].values())


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    assert len(one) == len(other)
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, after a graph break.
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", EACH)
def test_models_stay_compiled(name: str, training: bool) -> None:
    made, backend, is_whole = MODELS[name]
    model = made().train(training)
    mask: dict[str, Any] = {} if "net" in name else {"attention_mask": MASK}
    state = copy.deepcopy(model.state_dict())

    def run(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(x, **mask).last_hidden_state
        return output

    def fresh(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        with amanda.disabled():
            model.load_state_dict(state)  # Statistics of normalization change in each step.
        return step(model, call, training)

    if not is_whole:
        # Dynamo remembers which sizes change, so it breaks graphs elsewhere from now on.
        fresh(torch.compile(run, backend="eager"))
    compiled = torch.compile(run, fullgraph=is_whole, backend=backend)
    before = graphs(), breaks()
    eager, plain = fresh(run), fresh(compiled)
    count, broken = graphs() - before[0], breaks() - before[1]
    assert (count == 1, broken == 0) == (is_whole, is_whole)
    tool, reference = Counting(), Counting()
    with amanda.apply(tool) as handle:
        woven = fresh(compiled)
        assert graphs() - before[0] - count == count or not is_whole
        assert breaks() - before[1] - broken == broken
        for _ in range(STEPS - 1):
            step(model, compiled, training)
        gaps = [gap.what for gap in handle.coverage()["pytorch"]]
    assert not any(gap.startswith("compiled callable") for gap in gaps)
    with amanda.apply(reference):
        for _ in range(STEPS):
            step(model, run, training)
    assert tool.forward == reference.forward
    assert tool.backward == reference.backward
    assert sum(tool.forward.values()) >= STEPS
    assert (sum(tool.backward.values()) >= STEPS) == training
    assert distance(woven, eager) <= 2 * distance(plain, eager) + 1e-6
    count = graphs()
    left = fresh(compiled)
    with amanda.apply(tool):
        again = fresh(compiled)
    assert graphs() == count or not is_whole
    assert all(map(torch.equal, left, plain))
    assert all(map(torch.equal, again, woven))


class Masks(amanda.Tool):
    """Prunes the weights of `linear` by a staged routine."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[str, torch.Tensor] = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.op_type == "linear":
            weight = context.get_inputs()[1]
            mask = self.masks[context.name] = (weight.abs() > weight.abs().median()).float()
            context.insert_before_op(self.prune, inputs=[1], mask=mask)

    @staticmethod
    @amanda.staged
    def prune(weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return weight * mask


class Straight(torch.autograd.Function):
    """A masked weight, whose gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return weight * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Masked(nn.Linear):
    """The same pruning, written into the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, Straight.apply(self.weight, self.mask), self.bias)


# Dynamo's own, of a function written by hand.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_staged_pruning_has_the_bits_of_the_model_written_by_hand(training: bool) -> None:
    model = bert().train(training)
    written = copy.deepcopy(model)
    for module in written.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = Masked
            mask = (module.weight.abs() > module.weight.abs().median()).float()
            module.register_buffer("mask", mask)

    def called(one: nn.Module) -> list[torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = one(x).last_hidden_state
            return output

        call = torch.compile(run, fullgraph=True)
        if training:
            return step(one, call)
        with torch.no_grad():
            return [call(feed(one))]

    expected = called(written)
    with amanda.apply(tool := Masks()):
        found = called(model)
    assert tool.masks
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


KERAS = """
import collections, json, os, sys
os.environ["KERAS_BACKEND"] = "torch"
import keras, torch
import amanda
from torch._dynamo.utils import counters

torch.manual_seed(0)
layers = keras.layers
image = keras.Input((8, 8, 3))
x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, activation="relu")(image))
x = layers.LayerNormalization()(layers.Dense(16, activation="gelu")(x))
model = keras.Model(image, layers.Dense(4, activation="softmax")(x))
X = torch.randn(2, 8, 8, 3)

def run(x):
    return model(x, training=True)

def step(call):
    model.zero_grad()
    output = call(X)
    output.square().mean().backward()
    return [output.detach().clone(), *(p.grad.clone() for p in model.parameters())]

def counted():
    return counters["stats"]["unique_graphs"]

class Counting(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.found = collections.Counter()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        for side, insert in (
            ("forward", context.insert_before_op), ("backward", context.insert_before_backward_op)
        ):
            key = f"{side} {context.op_type}"
            insert(lambda *_, key=key: self.found.update([key]), observe=True)

compiled = torch.compile(run, backend=sys.argv[1])
plain, eager = step(compiled), step(run)
before, tool, reference = counted(), Counting(), Counting()
with amanda.apply(tool):
    woven = step(compiled)
    after = counted()
    for _ in range(4):
        step(compiled)
with amanda.apply(reference):
    for _ in range(5):
        step(run)
off = lambda found: max(float((a - b).abs().max()) for a, b in zip(found, eager, strict=True))
print(json.dumps([before, after, off(plain), off(woven), tool.found, reference.found]))
"""


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_a_keras_model_on_torch_stays_as_compiled_as_it_is(backend: str) -> None:
    """Keras' own code is in several graphs of plain programs, too."""
    command = [sys.executable, "-W", "ignore", "-c", KERAS, backend]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    before, after, plain, woven, found, reference = json.loads(done.stdout.splitlines()[-1])
    assert 0 < before < after <= 2 * before
    assert woven <= 2 * plain + 1e-6
    assert found == reference
    assert found["forward conv2d"] == found["backward conv2d"] == STEPS
    assert found["forward layer_norm"] == STEPS
