"""Tasks of tools, and how other libraries do them: each way runs steps, and says what it found.

Libraries that are separate packages are imported where they are used. Long, since it is a list of
ways.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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

from .bench_models import Program

__all__ = ["TASKS", "Session", "Task", "Tensor", "Way"]


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
    """A task, and the ways to do it.

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
