"""Measure what each shipped tool costs in training: narrow BERT, ResNet-50, Keras' `fit`.

Writes docs/benchmarks/tools.md from docs/benchmarks/tools.json, to which each run adds its subject.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import amanda
from amanda_tools.capture import Capture
from amanda_tools.dump import Dump
from amanda_tools.effective_path import EffectivePath
from amanda_tools.faults import InjectFaults
from amanda_tools.fingerprint import Fingerprint
from amanda_tools.flops import Flops
from amanda_tools.gating import PruneAttention, PruneChannels, PrunePositions
from amanda_tools.graph import GraphTracing
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.nonfinite import NonFinite
from amanda_tools.prune import Prune, PruneNM, PruneTiles
from amanda_tools.quantize import Quantize
from amanda_tools.rematerialize import Rematerialize
from amanda_tools.replicas import Replicas
from amanda_tools.rewriting import Rewrite
from amanda_tools.sensitivity import Sensitivity
from amanda_tools.sparsity import Sparsity
from amanda_tools.steer import Steer
from amanda_tools.summary import Summary
from amanda_tools.trace import Trace

from .bench_machine import machine, versions
from .bench_report import table

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "tools.md"
FIGURES = OUTPUT.with_suffix(".json")

TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    "trace": Trace,
    "graph": GraphTracing,
    "flops": Flops,
    "latency": Latency,
    "memory": Memory,
    "sparsity": Sparsity,
    "nonfinite": NonFinite,
    "effective_path": EffectivePath,
    "capture": lambda: Capture(ops=["linear", "conv2d", "matmul"], form="memory"),
    "dump": lambda: Dump(steps=[0]),
    "prune": lambda: Prune(0.5),
    "prune_nm": PruneNM,
    "prune_tiles": lambda: PruneTiles(0.5),
    "prune_channels": PruneChannels,
    "prune_attention": PruneAttention,
    "prune_positions": PrunePositions,
    "quantize": Quantize,
    "inject_faults": InjectFaults,
    "steer": lambda: Steer("scale", factor=0.9, ops=["linear", "conv2d"]),
    "rewrite": Rewrite,
    "rematerialize": Rematerialize,
    "replicas": Replicas,
    "sensitivity": Sensitivity,
    "summary": Summary,
    "fingerprint": Fingerprint,
}
#: Steps under a tool before the timed ones: analysis, settling, and the steps in which `latency`
#: measures the program without itself.
WARM = 9
#: The records: of tools that stay applied, and of tools that are used for one step.
ONE_SHOT = "one-shot"
RECORDS = ("warm", ONE_SHOT)

INTRODUCTION = """\
# What each shipped tool costs

Use this page to see which tools can stay on while a model trains. The figures are training steps
under each tool with its default options, in ratio to the plain step, as medians of single steps in
turns in one process, on one thread, from step {warm} on. `maintenance/benchmarks/tools_bench.py`
writes the page.

- `capture` keeps the outputs of linear layers and convolutions; `dump` writes the first step, and
  its figure is what it costs in the others.
- `effective_path` follows the neurons that decide, which is far more work than the network: it
  leaves out runs so that it costs at most 8 times a run on average.
- Times on a shared machine vary by a tenth or more, and the load is in the table below.
- *one-shot* is a new tool, one step under it, and its result, in ratio to the plain step.
- Where the rest goes: `prune` takes two calls of Python for each weight and step, which multiply
  the weight and its gradient by the mask. `latency` records times without Python, and counts a step
  at its end. `nonfinite` spends three quarters of what it adds in its routine, and the rest in
  hooks of backward nodes. `memory` makes an entry for each new buffer.
  `capture` copies each value and makes an entry for it. `effective_path` spends half of what it
  adds to narrow BERT in its routines, which copy values and note where they come from, two fifths
  in the network and the paths of each run, and the rest in calls of its routines. In Keras, each
  routine is a call of Python from a node of the graph, 850 in a step under `nonfinite`. The 2,840
  of `latency` are nodes that record when they ran, without Python.
"""


def torch_steps(name: str) -> tuple[Callable[[], object], Any]:
    """Return a training step of a model of `bench_models`, and nothing."""
    import torch

    from .bench_models import SUBJECTS

    torch.set_num_threads(1)
    return next(s for s in SUBJECTS if s.name.startswith(name)).program(training=True), None


def keras_steps(_: str) -> tuple[Callable[[], object], Any]:
    """Return an epoch of four steps of a Keras transformer in `fit`."""
    import os

    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import numpy as np
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64,), dtype="int32")
    x = keras.layers.Embedding(1000, 128)(inputs)
    for _block in range(2):
        attended = keras.layers.MultiHeadAttention(4, 32)(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        hidden = keras.layers.Dense(512, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(128)(hidden))
    outputs = keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    data = np.arange(32 * 4 * 64).reshape(-1, 64) % 1000, np.arange(128) % 2
    return lambda: model.fit(*data, batch_size=32, epochs=1, verbose=0), model


SUBJECTS: dict[str, Callable[[str], tuple[Callable[[], object], Any]]] = {
    "narrow BERT": torch_steps,
    "ResNet-50 at 64": torch_steps,
    "Keras transformer in fit": keras_steps,
}


@contextmanager
def under(tool: amanda.Tool) -> Iterator[None]:
    """Apply a tool; what it says at its end does not matter here."""
    with amanda.apply(tool):
        yield


def timed(step: Callable[[], object], count: int) -> list[float]:
    """Return the processor times of single steps."""
    times = []
    for _ in range(count):
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
    return times


def one_shot(step: Callable[[], object], make: Callable[[], amanda.Tool]) -> None:
    """Run one step under a new tool, and ask for its result."""
    with under(tool := make()):
        step()
    if (result := getattr(tool, "result", None)) is not None:
        result()


def measure(
    subject: str, names: list[str], rounds: int, step: Callable[[], object], once: bool = False
) -> dict[str, float]:
    """Return the ratio of a step under each tool to the plain step.

    Args:
        subject: What is measured, for messages.
        names: The tools.
        rounds: Number of plain steps before the tool, and after it.
        step: The step.
        once: Use each tool for one step only, with its first execution and its result.
    """
    timed(step, 3)
    found = {}
    for name in names:
        gc.collect()
        plain, instrumented = timed(step, rounds), []
        try:
            if once:
                instrumented = timed(partial(one_shot, step, TOOLS[name]), rounds)
            else:
                with under(TOOLS[name]()):
                    timed(step, WARM)
                    gc.collect()
                    instrumented = timed(step, 2 * rounds)
        except Exception as error:  # The page says so.
            print(f"{subject}: {name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        timed(step, 1)
        plain += timed(step, rounds)
        found[name] = statistics.median(instrumented) / statistics.median(plain)
        print(f"{subject}: {name}: {found[name]:.2f}", file=sys.stderr, flush=True)
    return found


def profile(subject: str, name: str, rows: int) -> None:
    """Print where the time of steps under a tool goes."""
    step, _ = SUBJECTS[subject](subject)
    timed(step, 3)
    with under(TOOLS[name]()):
        timed(step, WARM)
        with cProfile.Profile() as profiler:
            timed(step, 4)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(rows)


def report(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the page."""
    facts = {**machine(), **versions()}
    measured = [figures.get(name, {}) for name in RECORDS]
    columns, rows = ["tool"], []
    for subject in measured[0]:
        columns += [f"{subject}, warm", "one-shot"]
    for name in TOOLS:
        cells = [name]
        for subject in measured[0]:
            ratios = [side.get(subject, {}).get(name) for side in measured]
            cells += ["—" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        rows.append(cells)
    parts = [
        INTRODUCTION.format(warm=WARM + 1),
        table(["machine and versions", ""], [[k, str(v)] for k, v in facts.items()]),
        table(columns, rows),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--subject", choices=SUBJECTS, action="append")
    parser.add_argument("--only", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--profile", type=int, help="only print this many rows of a profile")
    options = parser.parse_args()
    for subject in options.subject or SUBJECTS:
        if options.profile:
            for name in options.only:
                profile(subject, name, options.profile)
            continue
        step, _ = SUBJECTS[subject](subject)
        rounds = 3 if options.quick else 7
        figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
        for record in RECORDS:
            found = measure(subject, options.only, rounds, step, once=record == ONE_SHOT)
            figures.setdefault(record, {}).setdefault(subject, {}).update(found)
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
        OUTPUT.write_text(report(figures))


if __name__ == "__main__":
    main()
