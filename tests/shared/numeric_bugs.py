"""Small programs with a numeric bug each, and the same programs without it.

`python numeric_bugs.py NAME` runs a program with its bug, `python numeric_bugs.py NAME right`
without. The comment `# bug` stands at the line of the operator at which the numbers go wrong.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Program = Callable[[bool], object]
#: Those that give NaN or infinity, which need no other run to compare with.
ALONE: dict[str, Program] = {}
#: Those that give other numbers than the right program.
WITH_REFERENCE: dict[str, Program] = {}


def _alone(program: Program) -> Program:
    ALONE[getattr(program, "__name__", "")] = program
    return program


def _with_reference(program: Program) -> Program:
    WITH_REFERENCE[getattr(program, "__name__", "")] = program
    return program


def bug_line(name: str) -> int:
    """Return the line of a program at which its numbers go wrong."""
    lines, first = inspect.getsourcelines({**ALONE, **WITH_REFERENCE}[name])
    (found,) = [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# bug")]
    return found


def _data() -> tuple[Tensor, nn.Linear, nn.Linear]:
    return torch.randn(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)


# Without a reference.


@_alone
def logarithm_of_a_probability(right: bool) -> object:
    x, first, second = _data()
    scores = second(first(x).relu()) * (1 if right else 1000)
    p = scores.softmax(-1)
    return p.log().mean()  # bug


@_alone
def root_of_zero_backward(right: bool) -> object:
    x, first, _ = _data()
    hidden = first(x).relu() + (1e-6 if right else 0)
    length = hidden.sqrt()  # bug
    return length.sum().backward()


@_alone
def constant_feature_normalized(right: bool) -> object:
    x, first, _ = _data()
    x[:, 3] = 1.0
    deviation = x.std(0) + (1e-5 if right else 0)
    x = (x - x.mean(0)) / deviation  # bug
    return first(x).sum()


@_alone
def half_overflow(right: bool) -> object:
    x, first, second = _data()
    hidden = first(x).half() * (1 if right else 300)
    energy = hidden.square() * 10  # bug
    return second(energy.float()).sum()


@_alone
def row_without_a_key(right: bool) -> object:
    x, first, second = _data()
    mask = torch.ones(4, 4).tril(0 if right else -1).bool()
    scores = (first(x) @ second(x).T).masked_fill(~mask, -math.inf)
    attention = scores.softmax(-1)  # bug
    return (attention @ x).sum()


@_alone
def cosine_of_equal_vectors(right: bool) -> object:
    x, first, _ = _data()
    hidden = first(x)
    cosine = (hidden - hidden.detach() + 1).clamp(max=1 - 1e-3 if right else 1)
    angle = cosine.acos()  # bug
    return angle.sum().backward()


@_alone
def power_of_a_negative_number(right: bool) -> object:
    x, first, _ = _data()
    hidden = first(x).abs() if right else first(x)
    return hidden.pow(0.5).mean()  # bug


# With a reference.


@_with_reference
def another_epsilon(right: bool) -> object:
    x, first, second = _data()
    hidden = F.layer_norm(first(x), (8,), eps=1e-5 if right else 1e-3)  # bug
    return second(hidden).sum()


@_with_reference
def attention_without_the_root(right: bool) -> object:
    x, first, second = _data()
    scores = first(x) @ second(x).T
    scores = scores / (8**0.5 if right else 8)  # bug
    return (scores.softmax(-1) @ x).sum()


@_with_reference
def transposed_square_weight(right: bool) -> object:
    x, first, second = _data()
    hidden = first(x).relu()
    return F.linear(hidden, second.weight if right else second.weight.T).sum()  # bug


@_with_reference
def dropout_in_evaluation(right: bool) -> object:
    x, first, second = _data()
    hidden = F.dropout(first(x), 0.5, training=not right)  # bug
    return second(hidden).sum()


@_with_reference
def another_gelu(right: bool) -> object:
    x, first, second = _data()
    hidden = F.gelu(first(x), approximate="none" if right else "tanh")  # bug
    return second(hidden).sum()


@_with_reference
def softmax_over_the_batch(right: bool) -> object:
    x, first, second = _data()
    weights = second(first(x).relu()).softmax(-1 if right else 0)  # bug
    return (weights * x).sum()


@_with_reference
def position_too_far(right: bool) -> object:
    positions = nn.Embedding(8, 8)
    x, first, _ = _data()
    numbers = torch.arange(4) + (0 if right else 1)  # bug
    return first(x + positions(numbers)).sum()


@_with_reference
def bias_not_loaded(right: bool) -> object:
    x, first, second = _data()
    if not right:
        nn.init.zeros_(second.bias)
    hidden = first(x).relu()
    return second(hidden).sum()  # bug


@_with_reference
def statistics_of_the_batch(right: bool) -> object:
    x, first, second = _data()
    norm = nn.BatchNorm1d(8).train(not right)
    hidden = norm(first(x))  # bug
    return second(hidden).sum()


@_with_reference
def product_in_16_bits(right: bool) -> object:
    x, first, second = _data()
    hidden = first(x).relu()
    with torch.autocast("cpu", torch.bfloat16, enabled=not right):
        hidden = second(hidden)  # bug
    return hidden.float().sum()


@_with_reference
def sum_and_not_mean(right: bool) -> object:
    x, first, second = _data()
    scores = second(first(x).relu())
    loss = F.mse_loss(scores, x, reduction="mean" if right else "sum")  # bug
    return loss.backward()


@_with_reference
def decay_of_weights(right: bool) -> object:
    x, first, _ = _data()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1, weight_decay=0 if right else 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        first(x).square().sum().backward()
        optimizer.step()  # bug
    return None


@_with_reference
def gradient_clipped_too_far(right: bool) -> object:
    x, first, _ = _data()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    first(x).square().sum().backward()
    nn.utils.clip_grad_norm_(first.parameters(), 1.0 if right else 0.1)  # bug
    return optimizer.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    {**ALONE, **WITH_REFERENCE}[sys.argv[1]](sys.argv[2:] == ["right"])
