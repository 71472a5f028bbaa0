"""Measure the cost of instrumentation on TensorFlow, by mode, relative to the plain program.

Runs plain and instrumented programs alternately in one process and compares medians. Writes
docs/benchmarks/tensorflow.json and tensorflow.md. `--quick` does fewer rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import amanda

from .bench_callgrind import count, counted, missing
from .bench_machine import cores

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
#: Pixels: few, so that an operator's own work hides little, and as many as the model is made for.
SIZE, FULL = 64, 224

FULL_EAGER = f"eager, {FULL} pixels"

#: Number of calls in each `apply`: the first ones analyse operators and find out which gradients
#: are needed; the others are timed, or their instructions counted.
WARM, TIMED, COUNTED = 6, 3, 2


class Nothing(amanda.Tool):
    """Has all four analysis routines, none of which inserts anything."""

    def __init__(self) -> None:
        super().__init__()
        for backward in (False, True):
            for require_outputs in (False, True):
                self.add_inst_for_op(self.look, backward, require_outputs)

    def look(self, context: amanda.OpContext) -> None:
        """Do nothing."""


def unchanged(*values: Any) -> None:
    """Change nothing, on the host."""


@amanda.staged
def unchanged_in_graph(*values: Any) -> None:
    """Change nothing, traced into the graph."""


class Convolutions(amanda.Tool):
    """Inserts a routine before each convolution and after the gradient of its filter."""

    def __init__(self, routine: Callable[..., None]) -> None:
        super().__init__()
        self.routine = routine
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        """Insert the routine before a convolution."""
        if context.op_type == "Conv2D":
            context.insert_before_op(self.routine)

    def backward(self, context: amanda.OpContext) -> None:
        """Insert the routine after the gradient of a filter."""
        if context.op_type == "Conv2DBackpropFilter":
            context.insert_after_backward_op(self.routine)


def eager_program(size: int) -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    """Return ResNet-50, its loss, and a training step without an update."""
    model = keras.applications.ResNet50(weights=None, input_shape=(size, size, 3), classes=10)
    images = tf.random.normal((1, size, size, 3), seed=0)

    def loss() -> Any:
        return tf.reduce_sum(model(images, training=True) ** 2)

    def step() -> Any:
        with tf.GradientTape() as tape:
            result = loss()
        return tape.gradient(result, model.trainable_variables)

    return model, loss, step


def programs() -> dict[str, Callable[[], Any]]:
    """Return the training step in each mode."""
    model, loss, step = eager_program(SIZE)
    forward = tf.function(loss)

    def taped() -> Any:
        with tf.GradientTape() as tape:
            result = forward()
        return tape.gradient(result, model.trainable_variables)

    return {
        "eager": step,
        FULL_EAGER: eager_program(FULL)[2],
        "function, tape outside": taped,
        "function, tape inside": tf.function(step),
        "session, ten runs": session_program(),
    }


def session_program() -> Callable[[], Any]:
    """Return ten runs of 53 stacked convolutions with their gradients in a session."""
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        value = v1.placeholder(tf.float32, (1, SIZE // 2, SIZE // 2, 16))
        source = value
        for number in range(53):
            kernel = v1.get_variable(f"kernel{number}", (3, 3, 16, 16), use_resource=True)
            value = tf.nn.relu(tf.nn.conv2d(value, kernel, 1, "SAME") + value)
        gradients = v1.gradients(tf.reduce_sum(value), v1.trainable_variables())
        start = v1.global_variables_initializer()
    session = v1.Session(graph=graph)
    session.run(start)
    feed = {source: np.ones((1, SIZE // 2, SIZE // 2, 16), np.float32)}

    def runs() -> None:
        # A single run is so short that the first runs after a change would dominate.
        for _ in range(10):
            session.run(gradients, feed)

    return runs


def measure(program: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Return the median of the plain program in milliseconds, and the others' ratios to it.

    Each measurement is compared with the plain ones directly before and after it, because the speed
    of a machine changes.
    """
    tools: dict[str, amanda.Tool | None] = {
        "plain again": None,
        "nothing inserted": Nothing(),
        "convolutions, host": Convolutions(unchanged),
        "convolutions, staged": Convolutions(unchanged_in_graph),
    }
    plain: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in tools}
    for turn in range(rounds + 1):
        before = _extent(program, None)
        for name, tool in tools.items():
            taken, after = _extent(program, tool), _extent(program, None)
            if turn >= 1:  # Functions are traced in the first turn.
                plain.append(after)
                ratios[name].append(2 * taken / (before + after))
            before = after
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    return {"plain, ms": statistics.median(plain) * 1000, **medians}


def _extent(program: Callable[[], Any], tool: amanda.Tool | None) -> float:
    with amanda.apply(tool) if tool is not None else nullcontext():
        for _ in range(WARM if tool is not None else 1):
            program()
        return statistics.median(_timed(program) for _ in range(TIMED))


def _timed(program: Callable[[], Any]) -> float:
    start = time.perf_counter()
    program()
    return time.perf_counter() - start


def instructions() -> dict[str, float]:
    """Count the eager program's instructions, in millions and as ratios; empty without valgrind."""
    absent = missing()
    if absent:
        print(f"No instructions are counted: no {' and no '.join(absent)}.", file=sys.stderr)
        return {}
    counts = count(__file__)
    plain = counts.pop("plain")
    return {
        "plain, millions": plain / COUNTED / 1e6,
        **{name: instructions / plain for name, instructions in counts.items()},
    }


def run_inside(library: Path) -> None:
    """Run the eager program plain and with tools, for callgrind."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    _, _, program = eager_program(SIZE)
    tools = {"nothing inserted": Nothing(), "convolutions, host": Convolutions(unchanged)}
    counted(library, "plain", program, nullcontext(), WARM, COUNTED)
    for name, tool in tools.items():
        counted(library, name, program, amanda.apply(tool), WARM, COUNTED)
    counted(library, "plain again", program, nullcontext(), WARM, COUNTED)


def rewriting(sizes: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Measure the first call under a tool for chains of this many ops.

    Returns:
        For each size: the median seconds of several chains, the seconds that TensorFlow takes to
        trace one, and the number of function calls per op, which does not depend on the machine.
    """
    found = {}
    for size in sizes:
        times, traced = [], []
        for _ in range(5):
            start = time.perf_counter()
            chain = _chain(size)
            traced.append(time.perf_counter() - start)
            # Exclude what earlier chains have left from garbage collection.
            gc.collect()
            gc.freeze()
            with amanda.apply(Nothing()):
                times.append(_timed(lambda chain=chain: chain(tf.ones(4))))  # type: ignore[misc]
        chain, profile = _chain(size), cProfile.Profile()
        with profile, amanda.apply(Nothing()):
            chain(tf.ones(4))
        calls: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
        found[str(size)] = {
            "seconds": statistics.median(times),
            "tracing, seconds": statistics.median(traced),
            "calls": calls / size,
        }
    return found


def _chain(size: int) -> Any:
    def negated(x: Any) -> Any:
        for _ in range(size):
            x = tf.raw_ops.Neg(x=x)
        return x

    chain = tf.function(negated, autograph=False)
    chain(tf.ones(4))
    return chain


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        run_inside(options.inside)
        return
    rounds = 3 if options.quick else 20
    modes = {
        # Fewer rounds, because a step takes seconds.
        name: measure(program, rounds if name != FULL_EAGER else rounds // 2)
        for name, program in programs().items()
    }
    sizes = rewriting((100, 1000, 3000, 10000))
    versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
    versions["python"] = platform.python_version()
    report = {
        "machine": f"{cores()} {'core' if cores() == 1 else 'cores'}, {platform.machine()}",
        "versions": versions,
        "rounds": rounds,
        "modes": modes,
        "instructions": instructions(),
        "rewriting, by number of ops": sizes,
    }
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "tensorflow.json").write_text(json.dumps(report, indent=2) + "\n")
    (OUTPUT / "tensorflow.md").write_text(as_markdown(report))
    print(as_markdown(report))


def as_markdown(report: dict[str, Any]) -> str:
    """Return the report as a page."""
    modes = report["modes"]
    columns = list(next(iter(modes.values())))
    lines = [
        "# What it costs on TensorFlow",
        "",
        "The cost of tools on TensorFlow, as the median of the ratios to the plain program. "
        '"plain again" shows the noise. Under "convolutions" a routine that changes nothing runs '
        "before each convolution and after its weight's gradient, on the host or, staged, in the "
        "graph.",
        "",
        f"- The program is ResNet-50 at {SIZE} pixels with one image, forward and backward; in the "
        "session it is 53 small convolutions.",
        f"- {report['rounds']} rounds run in one process, and half as many at {FULL} pixels, which "
        "the model is made for.",
        f"- Each round times {TIMED} calls under each tool after {WARM} untimed ones, and as many "
        "of the plain program before and after.",
        "",
        f"{report['machine']}, "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        + ".",
        "",
        f"| mode | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for mode, values in modes.items():
        lines.append(f"| {mode} | {' | '.join(f'{values[c]:.2f}' for c in columns)} |")
    found = report["instructions"]
    if found:
        plain, *ratios = found.values()
        lines += [
            "",
            "Times vary from run to run by more than an idle tool costs; instructions do not. "
            "These are the instructions of the eager row",
            f"on one thread, counted by valgrind's callgrind from step {WARM + 1} under each tool, "
            f"means of {COUNTED} steps:",
            "",
            f"| {' | '.join(found)} |",
            "|---" * len(found) + "|",
            f"| {' | '.join([f'{plain:.0f}', *(f'{ratio:.3f}' for ratio in ratios)])} |",
        ]
    lines += ["", "First call of a function under a tool that inserts nothing:", ""]
    lines += ["| ops | seconds | calls of functions, for each op | TensorFlow's tracing, seconds |"]
    lines += ["|---|---|---|---|"]
    for size, taken in report["rewriting, by number of ops"].items():
        lines.append(
            f"| {size} | {taken['seconds']:.2f} | {taken['calls']:.0f} "
            f"| {taken['tracing, seconds']:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
