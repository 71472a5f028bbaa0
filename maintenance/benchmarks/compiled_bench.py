"""Count the instructions of compiled models, plain and under tools, against the same change
written into the model.

Writes docs/benchmarks/compiled.md. Without valgrind or a C compiler it says so and writes nothing.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from transformers import BertConfig, BertModel

import amanda

from .bench_callgrind import count, counted, run
from .bench_machine import machine, versions
from .bench_report import table

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "compiled.md"
BACKENDS = ("aot_eager", "inductor")

#: Number of runs before and while counting, and how often as many are counted.
WARM, COUNTED, REPEATED = 150, 4, 5

PLAIN, IDLE, TOOL, BY_HAND = "plain", "nothing inserted", "pruned by a tool", "pruned by hand"
AFTER = "plain, after `apply`"
FIRST, OPEN = "nothing inserted, applied before the first call", "plain, without `fullgraph`"

INTRODUCTION = """\
# What tools cost in compiled models

Callables of `torch.compile` [stay compiled](../internals/pytorch.md#compiled-callables) under
tools. `nox -s bench` writes this page.

- Valgrind's callgrind counts the instructions of a warm call, or of a warm training step, in one
  process and on one thread: means of {counted} runs after {warm}, and of {repeated} such means the
  lowest, since other threads of torch run at times. Compilation is not counted, and the guards that
  are checked at each call are.
- The loss of a training step is computed outside of the compiled model, by two operators.
- "Nothing inserted" is a tool that analyses every operator and inserts nothing: 1 is the plain
  compiled model.
- "Pruned by a tool" is a staged routine that multiplies the weight of every `linear` with a mask:
  1 is a model whose layers do that themselves, by an `autograd.Function` that passes the gradient
  straight through, compiled likewise.
- In one column the tool is applied before the first call of a callable without `fullgraph`, as
  under `amanda run`: 1 is the same callable after the tool has left. In the others plain code was
  compiled first, with `fullgraph`.
- The models are small, so that nearly all is overhead. A larger one has hardly more extra
  instructions, and more of its own.
- Inductor generates code without AVX-512, which valgrind's processor lacks.
"""


class Nothing(amanda.Tool):
    """Analyses operators, and inserts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse, require_outputs=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Do nothing."""


class Prune(amanda.Tool):
    """Multiplies the weights of `linear` with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert a staged routine."""
        if context.op_type == "linear":
            mask = mask_of(context.get_inputs()[1])
            context.insert_before_op(self.prune, inputs=[1], mask=mask)

    @staticmethod
    @amanda.staged
    def prune(weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the weight with zeros."""
        return weight * mask


def mask_of(weight: torch.Tensor) -> torch.Tensor:
    """Return a mask of half of the weights."""
    return (weight.detach().abs() > weight.detach().abs().median()).float()


class Straight(Function):
    """A masked weight, whose gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the masked weight."""
        return weight * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient as it is."""
        return gradients[0], None


class Masked(nn.Linear):
    """A layer that is pruned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it with the masked weight."""
        return F.linear(x, Straight.apply(self.weight, self.mask), self.bias)  # type: ignore[no-untyped-call]


def by_hand(model: nn.Module) -> nn.Module:
    """Return a copy that prunes itself."""
    written = copy.deepcopy(model)
    for module in written.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = Masked
            module.register_buffer("mask", mask_of(module.weight))
    return written


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    """Return a network of two layers, and its input."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), torch.randn(4, 16)


def bert() -> tuple[nn.Module, torch.Tensor]:
    """Return a narrow BERT, and its input."""
    config = BertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        vocab_size=1000,
        max_position_embeddings=64,
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertModel(config, add_pooling_layer=False), torch.arange(8)[None]


MODELS = {"MLP (2 layers, width 32)": perceptron, "narrow BERT (2 layers, width 64)": bert}


def program(
    model: nn.Module, x: torch.Tensor, backend: str, training: bool, fullgraph: bool = True
) -> Callable[[], None]:
    """Return a call of the compiled model, or a training step."""

    def forward(x: torch.Tensor) -> Any:
        output = model(x)
        return output if isinstance(output, torch.Tensor) else output.last_hidden_state

    compiled = torch.compile(forward, backend=backend, fullgraph=fullgraph)

    def call() -> None:
        with torch.no_grad():
            compiled(x)

    def step() -> None:
        compiled(x).square().mean().backward()
        model.zero_grad()

    return step if training else call


def main() -> None:
    """Count and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it is short")
    run(parser, run_inside, write)


def write(_: argparse.Namespace) -> None:
    """Count in valgrind and write the table."""
    counts: dict[str, int] = {}
    for model in MODELS:
        for backend in BACKENDS:
            # One process each: what is compiled stays in memory.
            counts |= count(__file__, model, backend)
    OUTPUT.write_text(report({tuple(name.split("; ")): n for name, n in counts.items()}))


def run_inside(library: Path, names: list[str]) -> None:
    """Count inside valgrind."""
    torch.set_num_threads(1)
    name, backend = names
    with torch._inductor.config.patch({"cpp.simdlen": 256, "cpp.march": "x86-64-v3"}):
        for training in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model, x = MODELS[name]()
            plain = program(model, x, backend, training)
            written = program(by_hand(model), x, backend, training)
            broken = program(copy.deepcopy(model), x, backend, training, fullgraph=False)
            ways: list[tuple[str, Callable[[], None], AbstractContextManager[object]]] = [
                # First, since torch keeps what it has found about its own code.
                (FIRST, broken, amanda.apply(Nothing())),
                (OPEN, broken, nullcontext()),
                (PLAIN, plain, nullcontext()),
                (IDLE, plain, amanda.apply(Nothing())),
                (TOOL, plain, amanda.apply(Prune())),
                (BY_HAND, written, nullcontext()),
                (AFTER, plain, nullcontext()),
            ]
            for way, called, extent in ways:
                key = "; ".join([name, backend, "training" if training else "inference", way])
                counted(library, key, called, extent, WARM, COUNTED, REPEATED)


def report(counts: dict[tuple[str, ...], int]) -> str:
    """Return the page."""
    rows = []
    for case in dict.fromkeys(key[:3] for key in counts):
        found = {way: n / COUNTED for (*key, way), n in counts.items() if tuple(key) == case}
        pairs = ((IDLE, PLAIN), (FIRST, OPEN), (TOOL, BY_HAND), (AFTER, PLAIN))
        rows.append(
            [*case, *(f"{found[way] / 1e3:,.0f}" for way in (PLAIN, BY_HAND))]
            + [f"{found[way] / found[base]:.3f}" for way, base in pairs]
        )
    columns = ["model", "backend", "", "plain, thousand", "pruned by hand, thousand"]
    facts = {**machine(), **versions()}
    parts = [
        INTRODUCTION.format(warm=WARM, counted=COUNTED, repeated=REPEATED),
        table(["machine and versions", ""], [[k, str(v)] for k, v in facts.items()]),
        table([*columns, IDLE, FIRST, TOOL, AFTER], rows),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


if __name__ == "__main__":
    main()
