"""Resident memory over many training steps under each tool, as a table in Markdown.

`python -m maintenance.benchmarks.rss_bench [--program jax] [--steps 20000] [TOOL ...]` runs each
tool in a process of its own and prints the table. Memory that grows with the steps is a leak: of
the tool, unless it keeps what it saw by purpose.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

#: Parts of the run after which memory is read. Before the first one, caches fill.
PARTS = (0.05, 0.25, 0.5, 0.75, 1.0)
#: Arguments of tools that need some.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "capture": {"ops": ["relu"]},
    "prune": {"sparsity": 0.5},
    "prune_tiles": {"sparsity": 0.5},
}
TOOLS = ("plain", *sorted(point.name for point in entry_points(group="amanda.tools")))


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def torch_step() -> Callable[[], object]:
    """Return a training step of a small model on PyTorch."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def jax_step(jitted: bool = True) -> Callable[[], object]:
    """Return a training step of the same model on JAX, with plain gradient descent."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 4)
    x, y = jax.random.normal(keys[0], (16, 8)), jax.random.randint(keys[1], (16,), 0, 4)
    weights = {
        "first": {"kernel": jax.random.normal(keys[2], (8, 16)), "bias": jnp.zeros(16)},
        "second": {"kernel": jax.random.normal(keys[3], (16, 4)), "bias": jnp.zeros(4)},
    }

    def loss(weights: Any) -> jax.Array:
        hidden = jax.nn.relu(x @ weights["first"]["kernel"] + weights["first"]["bias"])
        scores = jax.nn.log_softmax(
            hidden @ weights["second"]["kernel"] + weights["second"]["bias"]
        )
        return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))

    def train(weights: Any) -> Any:
        gradients = jax.grad(loss)(weights)
        return jax.tree.map(lambda weight, slope: weight - 0.01 * slope, weights, gradients)

    compiled = jax.jit(train) if jitted else train

    def step() -> None:
        nonlocal weights
        weights = jax.block_until_ready(compiled(weights))

    return step


#: Name of a program -> what makes its training step.
PROGRAMS: dict[str, Callable[[], Callable[[], object]]] = {
    "torch": torch_step,
    "jax": jax_step,
    "jax-eager": lambda: jax_step(jitted=False),
}


def measure(program: str, name: str, steps: int) -> list[float]:
    """Run a program's steps under a tool, and return the resident memory after each part."""
    import amanda

    step = PROGRAMS[program]()
    tools = []
    if name != "plain":
        (point,) = (p for p in entry_points(group="amanda.tools") if p.name == name)
        tools.append(point.load()(**ARGUMENTS.get(name, {})))
    parts = {round(part * steps) for part in PARTS}
    found: list[float] = []
    with amanda.apply(*tools):
        for number in range(1, steps + 1):
            step()
            if number in parts:
                found.append(resident())
    return found


def main() -> None:
    """Measure the tools, each in its own process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", default=list(TOOLS))
    parser.add_argument("--program", choices=PROGRAMS, default="torch")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--here", action="store_true", help="measure one tool in this process")
    options = parser.parse_args()
    if options.here:
        print(
            *(f"{value:.1f}" for value in measure(options.program, options.tools[0], options.steps))
        )
        return
    print("| tool |", " | ".join(f"{round(p * options.steps):,} steps" for p in PARTS), "|")
    print("|---|" + "---|" * len(PARTS))
    for name in options.tools:
        command = [sys.executable, "-m", __spec__.name, name, "--program", options.program]
        with tempfile.TemporaryDirectory() as folder:
            run = subprocess.run(
                [*command, "--steps", str(options.steps), "--here"],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "AMANDA_OUTPUT": folder},
            )
        shown = run.stdout.split() if run.returncode == 0 else [run.stderr.splitlines()[-1]]
        print(f"| `{name}` |", " | ".join(shown), "|", flush=True)


if __name__ == "__main__":
    main()
