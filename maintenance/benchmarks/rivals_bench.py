"""Measure tools beside what people use today for the same output: warm, and for one step.

Writes docs/benchmarks/rivals.md. Each way runs in a process of its own, since some replace parts of
torch for good when they are imported. Run it with `nox -s bench`, or separately in ten minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import io
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import amanda
from amanda_tools.capture import Capture
from amanda_tools.flops import Flops
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.nonfinite import NonFinite
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize

from .bench_machine import machine, versions
from .bench_models import SUBJECTS, Program
from .bench_report import table

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "rivals.md"

#: Packages whose versions the page names.
PEERS = ("calflops", "fvcore", "nnsight", "torchao", "torchlens")

INTRODUCTION = """\
# Beside other libraries, at equal output

Use this page to choose a library for one of these tasks by what it costs. Each row does the same
work on the same model, in ratio to the plain model. `nox -s bench` writes this page.

- *one-shot* is a new tool, one step under it, and its result, the median of {once} times after an
  unmeasured one. Importing the library is not counted.
- *warm* is a step under a tool that stays applied, the median from step {warm} on. Libraries that
  are called for each step have no other figure there.
- *found* is what the way reported, so that one sees whether the outputs are equal. All do at least
  what the task says; Amanda's tools also name each operator, its module and its source line.
- Times are processor times on one thread, in a process of its own for each way, in which plain
  steps take turns with it.
- Settings are those that each library's documentation shows for the task.
- A tool that stays applied costs less than libraries that count or trace in Python, and more than
  a few hooks of one's own or a profiler in C++. One step alone pays for the analysis of each
  operator, about a quarter of a millisecond: there the others are cheaper.
"""


class Session(NamedTuple):
    """A way that is applied: how to run a step, and how to ask for what was found.

    Attributes:
        step: Runs the program once.
        result: Returns what was found, for the page.
    """

    step: Callable[[], object]
    result: Callable[[], str]


#: Applies a way to a program.
Way = Callable[[Program], AbstractContextManager[Session]]


class Task(NamedTuple):
    """What is done.

    Attributes:
        title: Heading of its row group.
        training: Whether a step trains.
        ways: Name of a way -> the way, Amanda's first.
    """

    title: str
    training: bool
    ways: dict[str, Way]


class Tensor(nn.Module):
    """A model whose output is one tensor, which all libraries take."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the last hidden state."""
        output: torch.Tensor = self.model(batch).last_hidden_state
        return output


def products(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers and convolutions of a model by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}


def of_tool(make: Callable[[], amanda.Tool], found: Callable[[Any], str]) -> Way:
    """Return the way of one of Amanda's tools."""

    @contextmanager
    def way(program: Program) -> Iterator[Session]:
        tool: Any = make()
        with amanda.apply(tool):
            yield Session(program, lambda: found(tool))

    return way


def of_calls(make: Callable[[Program], Callable[[], str]]) -> Way:
    """Return the way of a library that runs the model itself and returns what it found."""

    @contextmanager
    def way(program: Program) -> Iterator[Session]:
        last: list[str] = []
        call = make(program)
        yield Session(lambda: last.append(call()), lambda: last[-1])

    return way


def macs(count: float) -> str:
    """Return a count of multiply-accumulates for the page."""
    return f"{count / 1e6:.2f} M MACs"


@contextmanager
def flop_counter(program: Program) -> Iterator[Session]:
    """Count with PyTorch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:

        def step() -> None:
            counter.flop_counts.clear()
            program()

        yield Session(step, lambda: macs(counter.get_total_flops() / 2))


def fvcore(program: Program) -> Callable[[], str]:
    """Return the way of fvcore, which counts in a trace of TorchScript."""
    from fvcore.nn import FlopCountAnalysis

    def count() -> str:
        analysis = FlopCountAnalysis(program.model, program.batch)
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        return macs(analysis.by_module()[""])

    return count


def calflops(program: Program) -> Callable[[], str]:
    """Return the way of calflops, which replaces functions of torch while it counts."""
    from calflops import calculate_flops

    def count() -> str:
        _, found, _ = calculate_flops(
            program.model,
            args=[program.batch],
            print_results=False,
            print_detailed=False,
            output_as_string=False,
        )
        return macs(found)

    return count


def values(kept: dict[str, torch.Tensor]) -> str:
    """Return how many outputs were kept, and a figure of them."""
    return f"{len(kept)} outputs, sum of norms {sum(float(v.norm()) for v in kept.values()):.5g}"


def of_capture(tool: Capture) -> str:
    """Return what `capture` kept."""
    result = tool.result()
    # The last step's: the tool keeps those of each.
    last = {value.op: torch.as_tensor(result.read(value)) for value in result.values}
    return values({str(op): value for op, value in last.items()})


@contextmanager
def saving_hooks(program: Program) -> Iterator[Session]:
    """Keep copies by forward hooks."""
    kept: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        for name, module in products(program.model).items():

            def keep(_: nn.Module, inputs: object, output: torch.Tensor, name: str = name) -> None:
                kept[name] = output.detach().clone()

            stack.callback(module.register_forward_hook(keep).remove)
        yield Session(program, lambda: values(kept))


def nnsight_saving(program: Program) -> Callable[[], str]:
    """Return the way of nnsight, which saves outputs within a trace."""
    import nnsight

    wrapped: Any = nnsight.NNsight(program.model)
    batch = program.batch
    # By position, as it renames modules that are called `output`.
    layers = [m for m in wrapped.modules() if isinstance(m._module, nn.Linear | nn.Conv2d)]

    def save() -> str:
        with torch.no_grad(), wrapped.trace(batch):
            outputs: Any = [layer.output.save() for layer in layers]
            kept = outputs.save()
        return values({str(number): value for number, value in enumerate(kept)})

    return save


def torchlens_saving(program: Program) -> Callable[[], str]:
    """Return the way of TorchLens, which saves the outputs of these functions alone."""
    import torchlens

    kinds = {type(module).__name__.lower() for module in products(program.model).values()}
    chosen = torchlens.func(kinds.pop())
    for kind in kinds:
        chosen = chosen | torchlens.func(kind)

    def save() -> str:
        with torch.no_grad():
            trace = torchlens.trace(program.model, program.batch, save=chosen)
        saved = {op.layer_label: op.out for op in trace if op.has_saved_activation}
        return values(saved)

    return save


@contextmanager
def anomalies(program: Program) -> Iterator[Session]:
    """Search with PyTorch's own mode, which looks at gradients alone and ends with an error."""
    with torch.autograd.detect_anomaly(check_nan=True):
        yield Session(program, lambda: "no error")


@contextmanager
def finite_hooks(program: Program) -> Iterator[Session]:
    """Search with hooks of all modules, at outputs and at their gradients."""
    found: list[str] = []

    def look(name: str, values: object) -> None:
        several = values if isinstance(values, tuple) else (values,)
        tensors = [value for value in several if isinstance(value, torch.Tensor)]
        found.extend(name for tensor in tensors if not bool(tensor.isfinite().all()))

    with contextlib.ExitStack() as stack:
        for name, module in program.model.named_modules():

            def forward(_: nn.Module, inputs: object, output: object, name: str = name) -> None:
                look(name, output)
                for value in output if isinstance(output, tuple) else (output,):
                    if isinstance(value, torch.Tensor) and value.requires_grad:
                        hook: Any = value.register_hook
                        hook(lambda gradient: look(name, gradient))

            stack.callback(module.register_forward_hook(forward).remove)
        yield Session(program, lambda: f"{len(found)} not finite")


def profiler(memory: bool) -> Way:
    """Return PyTorch's profiler, with its table by operator."""

    @contextmanager
    def way(program: Program) -> Iterator[Session]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=memory) as running:

            def result() -> str:
                running.stop()
                averages = running.key_averages()
                averages.table(sort_by="self_cpu_time_total")
                return f"{len(averages)} kinds"

            yield Session(program, result)

    return way


def zeros(weights: list[torch.Tensor]) -> str:
    """Return how much of weights is zero."""
    total = sum(weight.numel() for weight in weights)
    return f"{sum(int((weight == 0).sum()) for weight in weights) / total:.3f} of weights zero"


@contextmanager
def torch_prune(program: Program) -> Iterator[Session]:
    """Prune with PyTorch's own masks, which are multiplied before each forward."""
    from torch.nn.utils import prune as torch_masks

    prune: Any = torch_masks
    layers: list[Any] = list(products(program.model).values())
    for layer in layers:
        prune.l1_unstructured(layer, "weight", 0.5)
    try:
        yield Session(program, lambda: zeros([layer.weight for layer in layers]))
    finally:
        for layer in layers:
            prune.remove(layer, "weight")


def of_prune(tool: Prune) -> str:
    """Return what `prune` set to zero."""
    result = tool.result()
    elements = sum(weight.elements for weight in result.weights)
    return f"{sum(weight.pruned for weight in result.weights) / elements:.3f} of weights zero"


@contextmanager
def torch_quantization(program: Program) -> Iterator[Session]:
    """Train with torch.ao's eager quantization, in its default configuration."""
    import copy

    from torch.ao import quantization

    functions: Any = quantization
    model = copy.deepcopy(program.model).train()
    for layer in products(model).values():
        layer.qconfig = functions.get_default_qat_qconfig("x86")
    prepared = functions.prepare_qat(model)
    yield Session(
        Program(prepared, program.batch, training=True),
        lambda: f"{len(products(prepared))} layers",
    )


@contextmanager
def torchao_quantization(program: Program) -> Iterator[Session]:
    """Train with torchao's quantization: int8 weights by channel, activations by token."""
    import copy

    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = copy.deepcopy(program.model).train()
    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int8, "per_channel")
    quantize_(
        model,
        QATConfig(activation_config=activations, weight_config=weights, step="prepare"),
        filter_fn=lambda module, _: isinstance(module, nn.Linear),
    )
    quantized = [m for m in model.modules() if type(m).__name__ == "FakeQuantizedLinear"]
    yield Session(
        Program(model, program.batch, training=True),
        lambda: f"{len(quantized)} layers",
    )


TASKS = {
    "flops": Task(
        "MACs of a forward pass, by module",
        False,
        {
            "amanda `flops`": of_tool(Flops, lambda tool: macs(tool.result().passes[0].macs)),
            "FlopCounterMode": flop_counter,
            "fvcore": of_calls(fvcore),
            "calflops": of_calls(calflops),
        },
    ),
    "outputs": Task(
        "Copies of the outputs of all linear layers and convolutions",
        False,
        {
            "amanda `capture`": of_tool(
                lambda: Capture(ops=["linear", "conv2d"], values=["outputs"]), of_capture
            ),
            "forward hooks": saving_hooks,
            "nnsight": of_calls(nnsight_saving),
            "TorchLens": of_calls(torchlens_saving),
        },
    ),
    "finite": Task(
        "Values and gradients that are not finite",
        True,
        {
            "amanda `nonfinite`": of_tool(
                NonFinite, lambda tool: f"{len(tool.result().faults)} not finite"
            ),
            "detect_anomaly (gradients only)": anomalies,
            "hooks of modules": finite_hooks,
        },
    ),
    "latency": Task(
        "Time by operator",
        False,
        {
            "amanda `latency`": of_tool(
                Latency, lambda tool: f"{len(list(tool.result().by_type()))} kinds"
            ),
            "torch.profiler": profiler(memory=False),
        },
    ),
    "memory": Task(
        "Memory by operator, in training",
        True,
        {
            "amanda `memory`": of_tool(Memory, lambda tool: f"{len(tool.result().ops)} operators"),
            "torch.profiler, with memory": profiler(memory=True),
        },
    ),
    "prune": Task(
        "Training with half of each weight masked, by magnitude",
        True,
        {
            "amanda `prune`": of_tool(lambda: Prune(0.5), of_prune),
            "torch.nn.utils.prune": torch_prune,
        },
    ),
    "quantize": Task(
        "Training with int8 weights and activations",
        True,
        {
            "amanda `quantize`": of_tool(
                Quantize, lambda tool: f"{len(tool.result().weights)} weights"
            ),
            "torch.ao (QAT)": torch_quantization,
            "torchao (QAT, linear layers only)": torchao_quantization,
        },
    ),
}

#: How many times a new tool is used for one step, and the steps of a tool that stays applied.
ONCE, WARM, STEPS = 5, 10, 15


def timed(step: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def measure(subject: str, task: Task, name: str) -> dict[str, Any]:
    """Return the ratios of one way to the plain program, and what it found."""
    chosen = next(s for s in SUBJECTS if s.name == subject)
    torch.manual_seed(0)
    model, batch = chosen.make()
    program = Program(Tensor(model), batch, task.training)
    way = task.ways[name]
    found = ""

    def once() -> None:
        nonlocal found
        with contextlib.redirect_stdout(io.StringIO()), way(program) as session:
            session.step()
            found = session.result()

    for _ in range(3):
        program()
    once()
    plain, shots, warm = [], [], []
    for _ in range(ONCE):
        gc.collect()
        plain.append(timed(program))
        shots.append(timed(once))
    with contextlib.redirect_stdout(io.StringIO()), way(program) as session:
        for _ in range(WARM):
            session.step()
        gc.collect()
        warm = [timed(session.step) for _ in range(STEPS)]
    plain += [timed(program) for _ in range(STEPS)]
    base = statistics.median(plain)
    return {
        "once": statistics.median(shots) / base,
        "warm": statistics.median(warm) / base,
        "found": found,
        "plain": base * 1e3,
    }


def report(figures: dict[str, dict[str, dict[str, dict[str, Any]]]]) -> str:
    """Return the page, given task -> way -> subject -> figures."""
    facts = {**machine(), **versions()}
    facts |= {name: importlib.metadata.version(name) for name in PEERS}
    parts = [
        INTRODUCTION.format(once=ONCE, warm=WARM + 1),
        table(["machine and versions", ""], [[k, str(v)] for k, v in facts.items()]),
    ]
    for key, ways in figures.items():
        columns, rows = [""], []
        for subject in next(iter(ways.values())):
            columns += [f"{subject}, warm", "one-shot", "found"]
        for name, found in ways.items():
            cells = [name]
            for row in found.values():
                cells += [_ratio(row["warm"]), _ratio(row["once"]), row["found"]]
            rows.append(cells)
        parts += [f"## {TASKS[key].title}", table(columns, rows)]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _ratio(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first subject only")
    parser.add_argument("--task", choices=TASKS, action="append", help="only this one")
    parser.add_argument("--one", nargs=3, metavar=("SUBJECT", "TASK", "WAY"), help="for itself")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.one:
        subject, key, name = options.one
        print(json.dumps(measure(subject, TASKS[key], name)))
        return
    figures: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for key in options.task or TASKS:
        for name in TASKS[key].ways:
            for subject in SUBJECTS[: 1 if options.quick else 2]:
                command = [sys.executable, "-m", __spec__.name, "--one", subject.name, key, name]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:  # The page says so.
                    why = done.stderr.strip().rpartition("\n")[2]
                    row = {"warm": None, "once": None, "found": why[:120].replace("|", "/")}
                else:
                    row = json.loads(done.stdout.strip().rpartition("\n")[2])
                figures.setdefault(key, {}).setdefault(name, {})[subject.name] = row
                print(key, name, subject.name, row, file=sys.stderr, flush=True)
    options.output.write_text(report(figures))


if __name__ == "__main__":
    main()
