"""Accuracy of the profilers on a known sleep, their results on a real network, and their cost.

Uses PyTorch. Run it with `nox -s bench`, or separately in two minutes. It prints the figures for
the pages in docs/tools/ and draws their pictures.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from torch import nn
from transformers import BertConfig, BertModel, ResNetConfig, ResNetForImageClassification

import amanda
from amanda_tools.flops import Flops
from amanda_tools.latency import Latency, LatencyResult
from amanda_tools.memory import Memory, MemoryResult
from amanda_tools.prune import Prune
from amanda_tools.sparsity import Sparsity, SparsityResult
from amanda_tools.trace import Trace

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "tools"
TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    "flops": Flops,
    "latency": Latency,
    "memory": Memory,
    "sparsity": Sparsity,
    "trace": Trace,
    "prune": lambda: Prune(0.5),
}


class OwnTime(Latency):
    """Uses the time of the thread, which excludes other work of the machine."""

    now = staticmethod(time.thread_time_ns)


class Sleep(torch.autograd.Function):
    """An operator that takes 100 ms."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Sleep for 100 ms."""
        time.sleep(0.1)
        return x.clone()


def sleeping() -> None:
    """Print what the latency profiler measures for a known duration."""
    tool = Latency()
    with amanda.apply(tool):
        for _ in range(5):
            Sleep.apply(torch.ones(1))  # type: ignore[no-untyped-call]
    op = next(op for op in tool.result().ops if op.type == "Sleep")
    shortest, longest = op.shortest / 1e6, op.longest / 1e6
    print(f"a sleep of 100 ms reads {op.total / op.calls / 1e6:.3f} ({shortest:.3f}-{longest:.3f})")


def resnet() -> nn.Module:
    """Return ResNet-50."""
    torch.manual_seed(0)
    config = ResNetConfig()
    config.num_labels = 1000
    return ResNetForImageClassification(config)


def train(model: nn.Module, images: int, side: int, steps: int) -> None:
    """Train on random images."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(steps):
        x, labels = torch.rand(images, 3, side, side), torch.randint(1000, (images,))
        loss: Any = nn.functional.cross_entropy(model(x).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def under(tool: Any, *training: Any) -> Any:
    """Return the result of a tool after training."""
    with amanda.apply(tool):
        train(*training)
    return tool.result()


def overhead(rounds: int) -> None:
    """Print the time of forward passes under each tool, relative to plain ones, in turns."""
    config = BertConfig(hidden_size=32, num_attention_heads=2, intermediate_size=64)
    subjects: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "BERT of width 32, 16 tokens": (BertModel(config), torch.ones(1, 16).long()),
        "ResNet-50 at 64 pixels": (resnet(), torch.rand(1, 3, 64, 64)),
    }
    for name, (model, x) in subjects.items():
        model.train(False)
        times: dict[str, list[float]] = {"plain": [], **{tool: [] for tool in TOOLS}}
        tools = {tool: make() for tool, make in TOOLS.items()}
        with torch.no_grad():
            for _ in range(rounds):
                for way, measured in times.items():
                    tool = tools.get(way)
                    handle = None if tool is None else amanda.attach(tool)
                    model(x)
                    start = time.thread_time()
                    model(x)
                    measured.append(time.thread_time() - start)
                    if handle is not None:
                        handle.remove()
        plain = statistics.median(times.pop("plain"))
        shown = ", ".join(f"{w} {statistics.median(t) / plain:.2f}" for w, t in times.items())
        print(f"{name}: plain {plain * 1e3:.1f} ms; by it: {shown}")


def draw_latency(path: Path, result: LatencyResult) -> None:
    """Draw self times by type, forward and backward."""
    sums = dict(list(result.by_type().items())[:10])
    names = list(sums)[::-1]
    forward = [sums[name].forward / 1e6 for name in names]
    backward = [sums[name].backward / 1e6 for name in names]
    figure, axes = plt.subplots(figsize=(7, 3.2))
    axes.barh(names, forward, label="forward")
    axes.barh(names, backward, left=forward, label="backward")
    axes.set_xlabel("self time, ms")
    axes.legend(loc="lower right")
    save(figure, path)


def draw_memory(path: Path, result: MemoryResult) -> None:
    """Draw the live memory over time."""
    begin = result.timeline[0].time
    times = [(moment.time - begin) / 1e6 for moment in result.timeline]
    live = [moment.live / 1e6 for moment in result.timeline]
    given = [moment.given / 1e6 for moment in result.timeline]
    figure, axes = plt.subplots(figsize=(7, 3.2))
    axes.stackplot(times, given, live, labels=["there before", "from operators"], step="post")
    highest = max(range(len(live)), key=live.__getitem__)
    axes.annotate(
        f"peak, after {result.peak_op}",
        (times[highest], live[highest] + given[highest]),
        xytext=(0.3, 0.93),
        textcoords="axes fraction",
        arrowprops={"arrowstyle": "->"},
        fontsize=8,
    )
    axes.set_ylim(0, 1.2 * max(one + other for one, other in zip(live, given, strict=True)))
    axes.set_xlabel("ms")
    axes.set_ylabel("MB alive")
    axes.legend(loc="lower right")
    save(figure, path)


def draw_sparsity(path: Path, result: SparsityResult) -> None:
    """Draw the shares of the products in which no factor is zero."""
    products = result.products
    ticks = range(len(products))
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for label, values in (
        ("weight is not zero", [p.by_weight / p.macs for p in products]),
        ("input is not zero", [p.by_input / p.macs for p in products]),
        ("neither is zero", [p.by_both / p.macs for p in products]),
    ):
        axes.step(ticks, values, where="mid", label=label)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("convolution or linear layer")
    axes.set_ylabel("share of the MACs")
    axes.legend(fontsize=8)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a small picture."""
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller images, fewer rounds")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder for the pictures")
    options = parser.parse_args()
    mpl.use("Agg")
    # With several threads, times depend on what else the machine is doing.
    torch.set_num_threads(1)
    side, rounds = (64, 5) if options.quick else (224, 15)
    sleeping()
    for images in (2, 8):
        latency = under(OwnTime(), resnet(), images, side, 3)
        print(f"{images} images\n{latency.table('step')}")
    draw_latency(options.output / "latency.png", latency)
    gc.collect()
    memory = under(Memory(), resnet(), 2, side, 2)
    print(memory.table("step"))
    draw_memory(options.output / "memory.png", memory)
    tool = Sparsity()
    with amanda.apply(Prune(0.8), tool), torch.no_grad():
        resnet().eval()(torch.rand(2, 3, side, side))
    print(tool.result().table("product").first(5))
    draw_sparsity(options.output / "sparsity.png", tool.result())
    overhead(rounds)


if __name__ == "__main__":
    main()
