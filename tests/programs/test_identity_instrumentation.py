"""Tools that change nothing change no bit, on real models, forward and backward.

Each model is trained or evaluated for two iterations (the first analyses, the second is cached),
once plain and once with an identity routine at every point of every op. Outputs, loss, gradients,
parameters, buffers and the random state must be equal bit for bit.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

import amanda
from amanda_core import OpContext
from amanda_core.testing.kit.tools import Everywhere

from .architectures import ARCHITECTURES, Architecture, loss_of
from .bits import Bits, bits_of, differences, state_of

Routine = Callable[..., Any]

ITERATIONS = 2


#: The architectures; most are left to the slow tests.
SAMPLED = [
    a if a.name in ("bert", "mixtral", "unet") else pytest.param(a, marks=pytest.mark.slow)
    for a in ARCHITECTURES
]


# What identity means.


def nothing(*values: Any) -> None:
    """Return None: nothing is changed."""


def same(*values: Any) -> Any:
    """Return the same objects."""
    return values


def exact_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides and alignment, also of views with gaps or overlaps."""
    storage: Any = tensor.untyped_storage()
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor.detach().new_empty(0).set_(storage.clone(), *place)


def copied(value: Any, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a tensor, or the tensors in a list; return anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return copy(value)
    if isinstance(value, (list, tuple)):
        return [copied(item, copy) for item in value]
    return value


def exact_copies(*values: Any) -> Any:
    """Return copies with the same layout; to the driver each is a change."""
    return tuple(copied(value, exact_copy) for value in values)


def clones(*values: Any) -> Any:
    """Return what `clone` makes: views with gaps or overlaps become dense."""
    return tuple(copied(value, torch.clone) for value in values)


VARIANTS: dict[str, Routine] = {
    "none": nothing,
    "same": same,
    "exact_copies": exact_copies,
    "clones": clones,
}


# Where bits legitimately differ once a value is another object: such ops get their own values back.

RETURNS_INPUT = (
    "`to` hands its input back, so `y` is `x` and the users of both add up their gradients in one "
    "place; copied, `y` is a value of its own with a sum of its own: a + (b + c) for (a + b) + c"
)
VIEW_WRITTEN = (
    "the view is written in place, and an edited view is no longer a view of its base, "
    "as after `y = y.clone()` in the program"
)
DENSE_KERNEL = (
    "`clone` makes a strided view dense, and for a dense input PyTorch's vectorised kernel of silu "
    "rounds otherwise than its scalar one"
)

TOGETHER = (
    "a routine that wants the gradients of several inputs has to wait for all, and they go on in "
    "the order of positions; where the op is a composite that got one tensor at three positions, "
    "plain PyTorch adds them in the order in which its parts happen to run"
)

#: (variant, architecture) -> op type -> why this op is left alone.
EXCEPTIONS: dict[tuple[str, str], dict[str, str]] = {
    **{(variant, "shared"): {"einsum": TOGETHER} for variant in VARIANTS},
    ("exact_copies", "mamba"): {"to": RETURNS_INPUT},
    ("exact_copies", "mixtral"): {"to": RETURNS_INPUT},
    ("exact_copies", "unet"): {"__getitem__": VIEW_WRITTEN},
    ("clones", "mamba"): {
        "to": RETURNS_INPUT,
        "silu": DENSE_KERNEL,
        "__getitem__": DENSE_KERNEL,
    },
    ("clones", "mixtral"): {"to": RETURNS_INPUT, "silu": DENSE_KERNEL, "chunk": DENSE_KERNEL},
    ("clones", "unet"): {"__getitem__": VIEW_WRITTEN},
}


class Identity(Everywhere):
    """Calls `routine` at all six points: forward, aligned backward and raw backward.

    Ops of the types in `left_alone` get a routine that returns the same objects instead, or none
    for the gradients of their inputs if that is the reason.
    """

    def __init__(self, routine: Routine, left_alone: Mapping[str, str] | None = None) -> None:
        super().__init__(routine)
        self.left_alone = left_alone or {}

    def forward(self, context: OpContext) -> None:
        routine = same if context.op_type in self.left_alone else self.routine
        context.insert_before_op(routine)
        context.insert_after_op(routine)
        context.insert_before_backward_op(routine)
        if self.left_alone.get(context.op_type) is not TOGETHER:
            context.insert_after_backward_op(routine)


# What is compared.


def train(model: torch.nn.Module, architecture: Architecture) -> Iterator[tuple[str, Any]]:
    """Train for some iterations with momentum; yield what is to be recorded."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        output = model(**architecture.feed())
        loss = loss_of(output)
        torch.autograd.backward(loss)
        yield from observed(iteration, model, output, loss)
        optimizer.step()
    yield from ((f"trained {name}", p) for name, p in model.named_parameters())


def evaluate(model: torch.nn.Module, architecture: Architecture) -> Iterator[tuple[str, Any]]:
    """Iterate in evaluation mode, with gradients that accumulate."""
    for iteration in range(ITERATIONS):
        output = model(**architecture.feed())
        loss = loss_of(output)
        torch.autograd.backward(loss)
        yield from observed(iteration, model, output, loss)


def infer(model: torch.nn.Module, architecture: Architecture) -> Iterator[tuple[str, Any]]:
    """Iterate in evaluation mode, once without gradients and once in inference mode."""
    for iteration, mode in enumerate((torch.no_grad, torch.inference_mode)):
        with mode():
            output = model(**architecture.feed())
            yield from observed(iteration, model, output, loss_of(output))


def observed(
    iteration: int, model: torch.nn.Module, output: Any, loss: torch.Tensor
) -> Iterator[tuple[str, Any]]:
    """Return names and tensors after an iteration."""
    return ((f"{iteration} {name}", tensor) for name, tensor in state_of(model, output, loss))


Program = Callable[[torch.nn.Module, Architecture], Iterator[tuple[str, Any]]]
PROGRAMS: dict[str, Program] = {"train": train, "evaluate": evaluate, "infer": infer}


def run(architecture: Architecture, program: str, *tools: amanda.Tool) -> dict[str, Bits]:
    """Build the model, run the program on it, and return its record."""
    torch.manual_seed(5)
    model = architecture.build().train(program == "train")
    torch.manual_seed(7)
    bits: dict[str, Bits] = {}
    with amanda.apply(*tools) if tools else amanda.disabled():
        for name, tensor in PROGRAMS[program](model, architecture):
            with amanda.disabled():
                assert name not in bits
                bits[name] = bits_of(tensor)
    return bits


Plain = dict[tuple[str, str], dict[str, Bits]]


@pytest.fixture(scope="module")
def plain() -> Plain:
    """Provide the records of plain runs so far."""
    return {}


def case(architecture: Architecture, program: str, variant: str) -> Any:
    """Return one case; slow unless it is one of the sample."""
    name = architecture.name
    fast = name == "bert" and program != "evaluate"
    fast |= name in ("mixtral", "unet") and (program, variant) == ("train", "exact_copies")
    marks = () if fast else (pytest.mark.slow,)
    return pytest.param(
        architecture, program, variant, marks=marks, id=f"{name}-{program}-{variant}"
    )


@pytest.mark.parametrize(
    ("architecture", "program", "variant"),
    [case(*one) for one in itertools.product(ARCHITECTURES, PROGRAMS, VARIANTS)],
)
def test_identity_routines_change_no_bit(
    architecture: Architecture,
    program: str,
    variant: str,
    plain: Plain,
) -> None:
    key = (architecture.name, program)
    if key not in plain:
        plain[key] = run(architecture, program)
    left_alone = EXCEPTIONS.get((variant, architecture.name), {})
    instrumented = run(architecture, program, Identity(VARIANTS[variant], left_alone))
    assert differences(plain[key], instrumented) == []


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "name"), EXCEPTIONS)
def test_exceptions_are_still_needed(
    variant: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (architecture,) = (a for a in ARCHITECTURES if a.name == name)
    reasons = EXCEPTIONS[variant, name]
    record = run(architecture, "train")
    for op_type, reason in reasons.items():
        with capsys.disabled():
            print(f"\nidentity of {variant}, {name}: {op_type} is left alone: {reason}")
        others = {other: why for other, why in reasons.items() if other != op_type}
        instrumented = run(architecture, "train", Identity(VARIANTS[variant], others))
        # Which kernel rounds how is the machine's affair; the other reasons hold everywhere.
        assert differences(record, instrumented) or reason is DENSE_KERNEL


# Whether every backward op was seen.


class Meter(amanda.Tool):
    """Counts executions by name: forward ops, backward ops before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.before: collections.Counter[str] = collections.Counter()
        self.after: collections.Counter[str] = collections.Counter()
        self.add_inst_for_op(self.count_before, backward=True)
        self.add_inst_for_op(self.count_after, backward=True, require_outputs=True)

    def count_before(self, context: OpContext) -> None:
        self.before[context.get_backward_op().__name__] += 1

    def count_after(self, context: OpContext) -> None:
        self.after[context.get_backward_op().__name__] += 1


def nodes_of(
    loss: torch.Tensor, left_out: Callable[[int], bool] = lambda number: False
) -> collections.Counter[str]:
    """Return the names of the nodes of a loss's graph, each node once, including leaves.

    Nodes whose sequence number is in `left_out` are not counted.
    """
    names: collections.Counter[str] = collections.Counter()
    seen: set[Any] = set()
    queue = [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if not left_out(node._sequence_nr()):
                names[node.name().rpartition("::")[2]] += 1
            queue.extend(following for following, _ in node.next_functions)
    return names


def start(architecture: Architecture) -> torch.nn.Module:
    """Return the model, from the same seed each time."""
    torch.manual_seed(5)
    model = architecture.build().train()
    torch.manual_seed(7)
    return model


# Backward ops that only the instrumented program runs.

COUPLED = (
    "gradients of several outputs that a routine wants together meet in one node, so the backward "
    "ops of outputs that nothing uses (the LSTM's last states) run too, on None"
)

#: (variant, architecture) -> (backward op, how many more, why)
ADDITIONS: dict[tuple[str, str], tuple[str, int, str]] = {
    ("none", "lstm"): ("StackBackward0", 2, COUPLED),
    ("exact_copies", "lstm"): ("StackBackward0", 2, COUPLED),
}


@pytest.mark.parametrize("variant", [pytest.param("none", marks=pytest.mark.slow), "exact_copies"])
@pytest.mark.parametrize("architecture", SAMPLED, ids=str)
def test_every_backward_op_is_seen_once(
    architecture: Architecture, variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = start(architecture)
    expected = [nodes_of(loss_of(model(**architecture.feed()))) for _ in range(ITERATIONS)]
    if (variant, architecture.name) in ADDITIONS:
        name, more, reason = ADDITIONS[variant, architecture.name]
        with capsys.disabled():
            print(f"\nidentity of {variant}, {architecture}: {more} {name} more: {reason}")
        for counts in expected:
            counts[name] += more

    model = start(architecture)
    left_alone = EXCEPTIONS.get((variant, architecture.name), {})
    tool, identity = Meter(), Identity(VARIANTS[variant], left_alone)
    with amanda.apply(identity, tool), amanda.cache_disabled():
        for iteration in range(ITERATIONS):
            tool.before.clear()
            tool.after.clear()
            torch.autograd.backward(loss_of(model(**architecture.feed())))
            assert tool.before == expected[iteration]
            assert tool.after == expected[iteration]


def born_again(model: torch.nn.Module) -> Callable[[int], bool]:
    """Find the sequence numbers of nodes created in the second or a later call of a module."""
    now: Callable[[], int] = torch._C._autograd._get_sequence_nr
    calls: collections.Counter[torch.nn.Module] = collections.Counter()
    starts: list[int] = []
    again: list[range] = []

    def enter(module: torch.nn.Module, _: Any) -> None:
        calls[module] += 1
        starts.append(now())

    def leave(module: torch.nn.Module, *_: Any) -> None:
        start = starts.pop()
        if calls[module] > 1:
            again.append(range(start, now()))

    for module in model.modules():
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    return lambda number: any(number in calls for calls in again)


@pytest.mark.parametrize("architecture", SAMPLED, ids=str)
def test_every_backward_op_has_one_context(architecture: Architecture) -> None:
    """An op of a module that is called twice is one op, and so are its backward ops."""
    model = start(architecture)
    is_repetition = born_again(model)
    loss = loss_of(model(**architecture.feed()))
    expected = nodes_of(loss, is_repetition)

    model = start(architecture)
    tool = Meter()
    with amanda.apply(tool) as handle:
        for _ in range(ITERATIONS):
            torch.autograd.backward(loss_of(model(**architecture.feed())))
        assert handle.session is not None
        contexts = [c for c in handle.session.contexts() if c.is_backward()]
        found = collections.Counter(c.op_type for c in contexts)
    assert found == expected
    # Analysed once each, though there were two iterations.
    assert tool.before == tool.after == expected
