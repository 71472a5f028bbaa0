"""What can be evicted is known without a look at all values, as such a look would find it.

Random programs make, keep, view, write and free tensors, and run backward. `Scan` looks at all
values for each operator.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

import amanda
from amanda_core.runtime.threads import inside_routine
from amanda_tools.rematerialize import Rematerialize
from amanda_tools.rematerialize.evictable import Evictable
from amanda_tools.rematerialize.store import BudgetError

SIZES = (4, 16, 64)
UNARY: list[Any] = [torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.relu]
BINARY: list[Any] = [torch.mul, torch.add, torch.minimum]
VIEWS: list[Any] = [torch.Tensor.detach, lambda one: one.view(-1), lambda one: one[:]]
#: What programs do that the driver reports; what it does not.
REPORTED = ("write", "write_a_value", "write_several", "set_items", "relu_in_place")
UNREPORTED = ("write_unreported", "write_a_value_unreported")


@contextmanager
def errors_of_the_program() -> Iterator[None]:
    """Go on where PyTorch refuses to read what was written, or freed by an earlier backward."""
    try:
        yield
    except RuntimeError as error:
        if not re.search("modified by an inplace|second time", str(error)):
            raise


class Program:
    """A program that draws what it does next: of `acts`, and what makes and drops tensors."""

    def __init__(self, seed: int, *acts: str) -> None:
        self.random = random.Random(seed)
        always = [*["make"] * 4, *["chain"] * 4, "drop", "view", "read_saved", "backward"]
        self.acts = [getattr(self, name) for name in (*always, *acts)]
        self.leaves = [torch.full((n,), 0.5, requires_grad=True) for n in SIZES for _ in range(2)]
        self.buffers = [torch.full((n,), 0.25) for n in SIZES for _ in range(2)]
        self.freed: list[torch.Tensor] = []
        self.live: list[torch.Tensor] = []
        self.read: torch.Tensor | None = None
        self.gradients: list[torch.Tensor] = []

    def run(self, steps: int) -> list[torch.Tensor]:
        """Return all gradients that the program computes."""
        for _ in range(steps):
            self.random.choice(self.acts)()
        self.backward()
        return self.gradients

    def one_of(self, tensors: Sequence[torch.Tensor], size: int | None = None) -> torch.Tensor:
        found = [one for one in tensors if size is None or one.numel() == size]
        return self.random.choice(found or [t for t in self.leaves if size in (None, t.numel())])

    def combined(self, one: torch.Tensor) -> torch.Tensor:
        others = [*self.live, *self.leaves, *self.buffers]
        if self.random.random() < 0.5:
            made: torch.Tensor = self.random.choice(UNARY)(one)
        else:
            made = self.random.choice(BINARY)(one, self.one_of(others, one.numel()))
        return made

    def chain(self) -> None:
        """Make values to which nothing refers any more."""
        one = self.one_of([*self.live, *self.leaves])
        for _ in range(5):
            one = self.combined(one)
        self.live.append(one)

    def make(self) -> None:
        made = self.combined(self.one_of([*self.live, *self.leaves]))
        if self.live and self.random.random() < 0.6:
            self.live[self.random.randrange(len(self.live))] = made
        else:
            self.live.append(made)

    def drop(self) -> None:
        if self.live:
            del self.live[self.random.randrange(len(self.live))]

    def view(self) -> None:
        self.live.append(self.random.choice(VIEWS)(self.one_of(self.live)))

    def read_saved(self) -> None:
        """Keep what backward is going to read, as a program that looks at its graph may."""
        function = self.one_of(self.live).grad_fn
        with errors_of_the_program():
            self.read = getattr(function, "_saved_result", None)

    def backward(self) -> None:
        self.allocate()
        ends = [one for one in self.live if one.requires_grad and self.random.random() < 0.3]
        for end in ends:
            keep = self.random.random() < 0.3
            with errors_of_the_program():
                found = torch.autograd.grad(
                    end.sum(), self.leaves, allow_unused=True, retain_graph=keep
                )
                self.gradients += [one for one in found if one is not None]

    @torch.no_grad()
    def write(self) -> None:
        self.one_of([*self.leaves, *self.buffers]).mul_(0.9)

    @torch.no_grad()
    def write_a_value(self) -> None:
        self.one_of(self.live).mul_(0.9)

    @torch.no_grad()
    def write_several(self) -> None:
        torch._foreach_mul_([self.one_of(self.leaves), self.one_of(self.buffers)], 0.9)

    def set_items(self) -> None:
        self.one_of(self.buffers)[1:] = 0.3

    def relu_in_place(self) -> None:
        torch.nn.functional.relu(self.one_of(self.buffers), inplace=True)

    def write_unreported(self) -> None:
        with inside_routine():
            self.write()

    def write_a_value_unreported(self) -> None:
        with inside_routine():
            self.write_a_value()

    def free(self) -> None:
        """Free the memory of a tensor until it is read, as FSDP does."""
        if len(self.buffers) > 1:
            self.freed.append(self.buffers.pop(self.random.randrange(len(self.buffers))))
            self.freed[-1].untyped_storage().resize_(0)

    def allocate(self) -> None:
        for one in self.freed:
            one.untyped_storage().resize_(4 * one.numel())
        self.buffers += self.freed
        self.freed = []


class Scan:
    """Looks at all values each time when the floor may rise.

    Attributes:
        fixed: Maximum of the bytes that cannot be evicted.
        total: Maximum of all bytes.
        different: How often other values were taken for evictable.
        most: The largest number of values in memory.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fixed = self.total = self.different = self.most = 0
        require = Evictable.require

        def checked(memory: Evictable, total: int, later: int) -> None:
            evictable = {
                value
                for value in memory.held
                if not value.locks
                and not value.is_written
                and value.execution.is_repeatable
                and memory._users(value.alias) == 1  # type: ignore[arg-type]
            }
            fixed = total - sum(value.size for value in evictable)
            self.fixed = max(self.fixed, fixed + later)
            self.total = max(self.total, total)
            self.different += evictable != memory.found.keys()
            self.most = max(self.most, len(memory.held))
            require(memory, total, later)

        monkeypatch.setattr(Evictable, "require", checked)

    @property
    def floor(self) -> int:
        """The floor as it follows from this."""
        return min(self.fixed, self.total)


STEPS = 100


def run(program: Program, tool: Rematerialize) -> list[torch.Tensor]:
    with amanda.apply(tool):
        return program.run(STEPS)


@pytest.mark.parametrize("seed", range(10))
def test_what_the_driver_reports_is_known_exactly(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan, tool = Scan(monkeypatch), Rematerialize()
    run(Program(seed, *REPORTED), tool)
    assert scan.most > 10
    assert scan.different == 0
    assert tool.result().floor == scan.floor


@pytest.mark.parametrize("act", [*UNREPORTED, "free"])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_not_reported_does_not_make_the_floor_too_low(
    seed: int, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan, tool = Scan(monkeypatch), Rematerialize()
    run(Program(seed, *REPORTED, *[act] * 2), tool)
    assert scan.floor <= tool.result().floor <= scan.total


def test_a_write_that_is_not_reported_is_found_when_a_value_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scan, tool = Scan(monkeypatch), Rematerialize()
    factor, large = torch.full((64,), 0.9), torch.ones(128, requires_grad=True)
    with amanda.apply(tool):
        one = torch.ones(64, requires_grad=True)
        for _ in range(40):
            one = torch.sin(one * factor)
        with inside_routine():
            factor.mul_(0.9)
        torch.sin(large)
        assert tool._store is not None
        assert tool._store._memory.floor < scan.fixed
        del one
    assert scan.fixed <= tool.result().floor <= scan.total


@pytest.mark.parametrize("seed", range(5))
def test_the_floor_is_enough(seed: int) -> None:
    plain, free = Program(seed).run(STEPS), Rematerialize()
    assert all(map(torch.equal, run(Program(seed), free), plain))
    tool = Rematerialize(free.result().floor)
    assert all(map(torch.equal, run(Program(seed), tool), plain))
    assert tool.result().peak <= free.result().floor
    assert sum(op.repeated for op in tool.result().ops) > 0


def test_a_value_is_not_computed_from_one_that_was_written_meanwhile() -> None:
    """Plain PyTorch reads only the hyperbolic tangent, which is evicted."""
    x = torch.ones(3, requires_grad=True)
    with amanda.apply(Rematerialize(0, strict=False)):
        y = x.exp()
        edge = get_gradient_edge(y)
        loss = torch.tanh(y).mul(2).sum()
        x.exp().exp()
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(BudgetError, match="was written, or its memory freed, after"):
            torch.autograd.grad(loss, edge)
