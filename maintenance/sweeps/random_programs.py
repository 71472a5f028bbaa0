"""Random programs under random tools: plain, watched, edited, cached, not cached, in any order.

Each program is drawn from a seed: shared weights, branches on values, loops, writing in place and
through views, several dtypes, parts without gradients or recomputed. Compared to the bit are
- identity tools and the shipped tools that only look, with plain runs, as for operators,
- a run from the caches with one that analyses again, under the same edits,
- both interceptors, under the same edits,
- the orders of tools that edit different ops.
"""

# mypy: allow-untyped-calls
# torch does not annotate Tensor.backward and similar functions.

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda

from . import device
from .identity import ROUTINES, Identity, clones
from .models import LEFT_ALONE
from .observations import Facts, different, random_states, value
from .operators import INTERCEPTORS, VARIABLE, quiet
from .results import Failure, Part, versions
from .shipped import WAYS, applied, differing

WIDTH = 4
#: Types edited by one tool each, so that the order of the tools does not matter.
EDITED = (("tanh", "linear"), ("sigmoid", "mul"), ("relu", "cat", "layer_norm"))
#: As for models, and views through which lines write.
KEPT = (*LEFT_ALONE, "__getitem__", "t")

Line = Callable[["Drawn", torch.Tensor, torch.Tensor], torch.Tensor]


def _loop(drawn: Drawn, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        a = torch.tanh(drawn.shared(a))
    return a


def _branch(drawn: Drawn, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # Takes another branch in other steps, because the values change.
    if float(a.detach().sum()) > 0:
        return torch.sigmoid(a)
    return torch.relu(b)


def _written(drawn: Drawn, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a * 1
    a.add_(b).clamp_(-3, 3)
    return a


def _through_view(drawn: Drawn, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a * 1
    a[1].mul_(b[0])
    a.t()[2].add_(1)
    return a


def _mixed(drawn: Drawn, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    half = a.to(torch.bfloat16) @ b.to(torch.bfloat16)
    return half.float() + a.double().cos().float()


def _autocast(drawn: Drawn, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autocast(device.name, dtype=torch.bfloat16):
        hidden: torch.Tensor = drawn.shared(a)
    return hidden.float() * b


def _island(drawn: Drawn, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        constant = torch.sigmoid(b)
    return a * constant


def _recomputed(drawn: Drawn, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(drawn.nested, a, use_reentrant=False)
    return result


def _chosen(drawn: Drawn, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(a > b, a, b) + a[:, a.detach()[0].argsort()]


LINES: dict[str, Line] = {
    "tanh": lambda drawn, a, b: torch.tanh(a),
    "product": lambda drawn, a, b: torch.mul(a, b),
    "matrix product": lambda drawn, a, b: a @ b.mT,
    "concatenation": lambda drawn, a, b: torch.cat([a[:2], b[2:]]),
    "pieces": lambda drawn, a, b: torch.cat(a.chunk(2)[::-1]),
    "norm": lambda drawn, a, b: F.layer_norm(a, (WIDTH,), b[0]),
    # Not `a` twice: a composite op adds the gradients of one tensor in the order of its parts.
    "attention": lambda drawn, a, b: F.scaled_dot_product_attention(a, b, a * 2),
    "dropout": lambda drawn, a, b: F.dropout(a, 0.3),
    "shared module": lambda drawn, a, b: drawn.shared(a) + drawn.shared(b),
    "nested module": lambda drawn, a, b: drawn.nested(a),
    "several outputs": lambda drawn, a, b: a.max(0).values * torch.unbind(b)[1],
    "loop": _loop,
    "branch": _branch,
    "written": _written,
    "through a view": _through_view,
    "mixed dtypes": _mixed,
    "autocast": _autocast,
    "no_grad island": _island,
    "recomputed": _recomputed,
    "chosen by values": _chosen,
}


class Drawn(nn.Module):
    """A random program: each line works on two earlier values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        torch.manual_seed(seed)
        self.shared: nn.Linear = nn.Linear(WIDTH, WIDTH)
        self.nested: nn.Module = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH))
        self.lines = [
            (chance.choice(list(LINES)), chance.randrange(number + 1), chance.randrange(number + 1))
            for number in range(chance.randrange(2, 12))
        ]

    def forward(self, x: torch.Tensor) -> Any:
        """Return the sum of all values."""
        values = [x]
        for name, left, right in self.lines:
            values.append(LINES[name](self, values[left], values[right] * self.shared.weight))
        return torch.stack([value.float().square().mean() for value in values]).sum()


def run(seed: int, *tools: amanda.Tool, cached: bool = True) -> Facts:
    """Train under some tools for three steps; return losses, gradients and the random state."""
    return trained(seed, amanda.apply(*tools) if tools else amanda.disabled(), cached)


def trained(seed: int, extent: AbstractContextManager[Any], cached: bool = True) -> Facts:
    """Train in a context manager, such as that of a tool."""
    model = Drawn(seed).to(device.name)
    found: Facts = {}
    steps = []
    with extent:
        for _ in range(3):
            with amanda.disabled():
                x = torch.randn(WIDTH, WIDTH).to(device.name).requires_grad_()
            if cached:
                loss = model(x)
                loss.backward()
            else:
                with amanda.cache_disabled():
                    loss = model(x)
                    loss.backward()
            steps.append((loss, x.grad))
            with amanda.disabled(), torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
    for number, tensor in enumerate(itertools.chain(*steps, model.parameters())):
        found[f"{number}: value"] = None if tensor is None else value(tensor)
    found["random state"] = random_states()
    return found


class Editing(amanda.Tool):
    """Scales values and gradients of ops of some types by factors drawn from a seed."""

    def __init__(self, op_types: tuple[str, ...], seed: int) -> None:
        super().__init__()
        self.op_types, self.seed = op_types, seed
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert an edit at one or two places."""
        if context.op_type not in self.op_types:
            return
        chance = random.Random(f"{self.seed} {context.op_type}")
        for _ in range(chance.randrange(1, 3)):
            factor = chance.choice([0.5, 2.0, -1.0])
            chance.choice(
                [
                    lambda f: context.insert_before_op(_scaled, [0], factor=f),
                    lambda f: context.insert_after_op(_scaled, [0], factor=f),
                    lambda f: context.insert_before_backward_op(_scaled, [0], factor=f),
                    lambda f: context.insert_after_backward_op(_scaled, [0], factor=f),
                ]
            )(factor)


def _scaled(given: Any, factor: float) -> Any:
    if isinstance(given, (list, tuple)):
        return [item * factor for item in given]
    return given * factor


def check(part: Part, seed: int, routines: Collection[str]) -> None:
    """Compare one program in all ways; without `routines` under the shipped tools alone."""
    try:
        plain = run(seed)
    except Exception as error:
        part.left_out[f"program {seed}"] = f"it raises without Amanda: {error}"
        return
    if different(plain, run(seed), results_only=False):
        part.left_out[f"program {seed}"] = "two plain runs differ from one another"
        return
    part.counts["lines"] += len(Drawn(seed).lines)
    edited: dict[str, Facts] = {}
    for interceptor in INTERCEPTORS:
        os.environ[VARIABLE] = interceptor
        for name in routines:
            routine = ROUTINES[name]
            tool = Identity(routine, left_alone=KEPT if routine is clones else ())
            _compare(part, seed, f"{interceptor}, {name}", plain, run(seed, tool))
            part.counts["routines called"] += tool.called
        for way in WAYS:
            part.cases[f"program {seed}"] += 1
            if names := differing(way, plain, lambda how: trained(seed, applied(how))):
                part.failures.append(Failure(f"program {seed}", f"{interceptor}, {way}", names[:8]))
        if not routines:
            continue
        tools = [Editing(op_types, seed) for op_types in EDITED]
        edited[interceptor] = first = run(seed, *tools)
        part.counts["programs that edits change"] += bool(
            different(plain, first, results_only=False)
        )
        how = f"{interceptor}, edited"
        _compare(part, seed, f"{how}, not cached", first, run(seed, *tools, cached=False))
        watching = Identity(ROUTINES["none"])
        for order in ((2, 1, 0), (1, 2, 0)):
            others = [watching, *(tools[index] for index in order)]
            _compare(part, seed, f"{how}, order {order}", first, run(seed, *others))
    if not routines:
        return
    one, two = (edited[interceptor] for interceptor in INTERCEPTORS)
    _compare(part, seed, "edited, both interceptors", one, two)


def _compare(part: Part, seed: int, how: str, expected: Facts, found: Facts) -> None:
    case = f"program {seed}"
    part.cases[case] += 1
    names = different(expected, found, results_only=False)
    if names:
        what = f"lines: {', '.join(name for name, _, _ in Drawn(seed).lines)}"
        part.failures.append(Failure(case, how, [*names[:4], what]))


def sweep(
    sample: int,
    seed: int,
    seconds: float | None = None,
    routines: Collection[str] = tuple(ROUTINES),
) -> Part:
    """Run this many programs, with consecutive seeds; none starts after `seconds`."""
    part = Part("random", versions=versions())
    start = time.monotonic()
    with quiet():
        for number in range(seed, seed + sample):
            if seconds is not None and time.monotonic() - start > seconds:
                part.counts["programs not reached"] += seed + sample - number
                break
            try:
                check(part, number, routines)
            except Exception as error:
                part.cases[f"program {number}"] += 1
                told = f"raised {type(error).__name__}: {error}"
                part.failures.append(Failure(f"program {number}", "", [told]))
    return part
