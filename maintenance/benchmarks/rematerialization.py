"""What a memory budget costs: peaks, repeated work, and `torch.utils.checkpoint` beside it.

    python -m maintenance.benchmarks.rematerialization --out docs/tools/curves/rematerialize.csv

Each model trains two steps within ten budgets, from the smallest one that the tool promises to the
peak of the plain program. The peak is that of PyTorch's record of allocations, without what a
kernel allocates and frees itself. Work is counted in floating-point operations of products, forward
and backward, so that it is the same on every machine.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import amanda
from amanda_tools.rematerialize import Rematerialize

__all__ = ["MODELS", "Measured", "bert", "chain", "checkpointed", "resnet", "train"]

#: Returns a model and the function that computes its loss.
Make = Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]]


class Measured(NamedTuple):
    """A training run.

    Attributes:
        peak: Maximum of the bytes in use, without workspaces.
        values: Losses, parameters and gradients.
        buffers: Running statistics.
    """

    peak: int
    values: list[torch.Tensor]
    buffers: list[torch.Tensor]

    def equals(self, other: Measured) -> bool:
        """Return True if losses, parameters and gradients are the same bit for bit."""
        return all(map(torch.equal, self.values, other.values))


def measured(run: Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]) -> Measured:
    """Return the peak of the memory that lives longer than the kernel that allocated it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        values, buffers = run()
    found = sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree()))
    alive: dict[int, tuple[int, int, Any]] = {}
    lives = []
    for number, (_, address, size, kernel) in enumerate(found):
        if size > 0:
            alive[address] = (number, size, kernel)
        elif address in alive:
            begin, size, owner = alive.pop(address)
            if owner is None or owner != kernel:
                lives.append((begin, number, size))
    lives += [(begin, len(found), size) for begin, size, _ in alive.values()]
    changes = [0] * (len(found) + 1)
    for begin, end, size in lives:
        changes[begin] += size
        changes[end] -= size
    used = peak = 0
    for change in changes:
        used += change
        peak = max(peak, used)
    return Measured(peak, values, buffers)


def _allocations(roots: Sequence[Any]) -> Iterator[tuple[int, int, int, Any]]:
    """Yield time, address, bytes (negative if they are freed), and the outermost kernel."""
    stack = [(root, None) for root in roots]
    while stack:
        event, kernel = stack.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            yield event.start_time_ns, fields.ptr, fields.alloc_size, kernel
        elif kernel is None and event.name.startswith("aten::"):
            kernel = event.id
        stack += [(child, kernel) for child in event.children]


def chain() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a perceptron of 13 layers, and its loss."""
    layers = [nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Dropout(0.1)) for _ in range(12)]
    x, labels = torch.randn(256, 48), torch.arange(256) % 10
    model = nn.Sequential(*layers, nn.Linear(48, 10))
    return model, lambda model: nn.functional.cross_entropy(model(x), labels)


def bert() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a BERT of four layers, and its loss."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
    )
    config.num_labels = 10
    ids, labels = torch.arange(16 * 48).reshape(16, 48) % 300, torch.arange(16) % 10
    return BertForSequenceClassification(config), lambda m: m(input_ids=ids, labels=labels).loss


def resnet() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a ResNet of eight blocks, and its loss."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2])
    config.num_labels = 10
    images, labels = torch.randn(16, 3, 96, 96), torch.arange(16) % 10
    model = ResNetForImageClassification(config)
    return model, lambda model: model(pixel_values=images, labels=labels).loss


MODELS: dict[str, Make] = {"chain": chain, "bert": bert, "resnet": resnet}
#: Classes of the modules that are checkpointed, one by one.
_BLOCKS = ("Sequential", "BertLayer", "ResNetBasicLayer")


def checkpointed(make: Make) -> Make:
    """Return a model whose blocks keep only their inputs, by `torch.utils.checkpoint`."""

    def made() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        model, loss_of = make()
        for module in model.modules():
            if module is not model and type(module).__name__ in _BLOCKS:
                whole: Any = module
                whole.forward = partial(checkpoint, whole.forward, use_reentrant=False)
        return model, loss_of

    return made


def train(make: Make, tool: Rematerialize | None = None, steps: int = 2) -> Measured:
    """Train a model for some steps, and return its peak and all that it has learned."""

    def run() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(0)
        model, loss_of = make()
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        losses = []

        def steps_of_training() -> None:
            for number in range(steps):
                torch.manual_seed(number)
                optimizer.zero_grad(set_to_none=True)
                loss = loss_of(model)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.item())

        if tool is None:
            steps_of_training()
        else:
            with amanda.apply(tool):
                steps_of_training()
        found = [parameter.detach() for parameter in model.parameters()]
        found += [p.grad for p in model.parameters() if p.grad is not None]
        return [torch.tensor(losses), *found], list(model.buffers())

    return measured(run)


def work(make: Make, tool: Rematerialize | None = None) -> int:
    """Return the floating-point operations of the products of a training."""
    with FlopCounterMode(display=False) as counter:
        train(make, tool)
    return int(counter.get_total_flops())


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """Yield what is measured of a model: plain, within budgets, and with checkpoints."""
    make = MODELS[name]
    plain, base, watching = train(make), work(make), Rematerialize()
    assert train(make, watching).equals(plain)
    # Operators also run without data once, which tells their sizes.
    sizing = work(make, Rematerialize()) - base
    floor = watching.result().floor
    print(f"{name}: plain peak {plain.peak:,} bytes; smallest budget {floor:,} bytes", flush=True)

    def row(way: str, budget: float, found: Measured, again: float, ops: int) -> dict[str, Any]:
        return {
            "model": name,
            "way": way,
            "budget": f"{budget / plain.peak:.3f}",
            "peak": f"{found.peak / plain.peak:.3f}",
            "within": found.peak <= budget,
            "work": f"{again:.3f}",
            "repeated": ops,
            "equal": found.equals(plain),
            "statistics": all(map(torch.equal, found.buffers, plain.buffers)),
        }

    def share(tool: Rematerialize) -> float:
        return (work(make, tool) - sizing) / base

    for number in range(10):
        budget = int(floor + number / 9 * (plain.peak - floor))
        tool = Rematerialize(budget)
        found = train(make, tool)
        again = sum(op.repeated for op in tool.result().ops)
        yield row("rematerialize", budget, found, share(Rematerialize(budget)), again)
    other = checkpointed(make)
    found = train(other)
    yield row("torch.utils.checkpoint", found.peak, found, work(other) / base, 0)
    budget = max(found.peak, floor)
    tool = Rematerialize(budget)
    found = train(make, tool)
    again = sum(op.repeated for op in tool.result().ops)
    yield row("rematerialize beside it", budget, found, share(Rematerialize(budget)), again)


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--out", type=Path, help="a CSV file")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in given.models:
        for row in rows_of(name):
            print(row, flush=True)
            rows.append(row)
    if given.out is not None:
        with given.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
