"""Repeatable executions of PyTorch's operators: inputs, random numbers and autocasting.

Owns the record of one execution and its repetition. Which values are in memory is `store`'s.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from amanda_core.runtime.threads import inside_routine
from amanda_tools.rematerialize.policy import Entry
from amanda_tools.rematerialize.result import RematerializedOp

__all__ = [
    "STATISTICS",
    "Execution",
    "Extent",
    "Input",
    "Source",
    "Value",
    "map_tensors",
    "tensors_of",
]

#: Whether an operator returned a tensor or saved it for backward, and which of them it is.
Source = tuple[str, int]

#: Operators that write running statistics, on which their outputs in training do not depend. They
#: do not count it as a write.
STATISTICS = frozenset({"batch_norm", "instance_norm"})


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return `value` with each tensor replaced, also inside of lists and tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, a list or a tuple, in order."""
    found: list[torch.Tensor] = []
    map_tensors(tuple(value) if isinstance(value, tuple) else value, found.append)
    return found


class Extent(NamedTuple):
    """Which part of a storage a tensor is."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Extent:
        """Return the part that a tensor is."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def within(self, alias: torch.Tensor) -> torch.Tensor:
        """Return this part of the storage of `alias`, as a tensor of its own."""
        tensor = torch.empty(0, dtype=self.dtype, device=alias.device)
        with torch.no_grad():
            return tensor.set_(alias.untyped_storage(), self.offset, self.size, self.stride)


class Value(Entry):
    """The storage of a tensor that an execution made.

    Args:
        execution: The execution.
        tensor: The tensor.
        size: Size of its storage in bytes.

    Attributes:
        sources: The values that it is computed from.
        alias: A tensor on its storage while it is kept in memory; else None.
        version: The version of `alias`.
        handles: Number of tensors saved for backward that lie in it.
        locks: Number of computations that need it at the moment.
        user: A weak reference to a tensor of the program that lies in it.
    """

    __slots__ = ("alias", "execution", "handles", "locks", "sources", "user", "version")

    def __init__(self, execution: Execution, tensor: torch.Tensor, size: int) -> None:
        self.sources = tuple(
            dict.fromkeys(one.value for one in execution.inputs if one.value is not None)
        )
        super().__init__(execution.cost, size, self.sources)
        self.execution, self.version = execution, tensor._version
        self.alias: torch.Tensor | None = None
        self.handles = self.locks = 0
        self.user: weakref.ref[torch.Tensor] | None = None

    @property
    def readers(self) -> Iterable[Value]:
        """The values that are computed from it."""
        return cast("Iterable[Value]", self._children)

    @property
    def is_written(self) -> bool:
        """Return True if its memory has been written since it was computed."""
        return self.alias is not None and self.alias._version != self.version

    @property
    def is_freed(self) -> bool:
        """Return True if the program has freed its memory, as FSDP does of what it gathered."""
        return self.alias is not None and bool(self.size) and _is_freed(self.alias)


class Input(NamedTuple):
    """A tensor that an execution read.

    Attributes:
        value: The value in which it lies; None if that is not known.
        extent: Which part of the value it is.
        tensor: Without a value, an alias of the tensor; None if it must not be kept for this.
        version: The version of that tensor.
        differentiable: Whether it required a gradient.
    """

    value: Value | None
    extent: Extent | None
    tensor: torch.Tensor | None
    version: int
    differentiable: bool

    @property
    def is_lost(self) -> bool:
        """Return True if what was read can no longer be had."""
        if self.value is not None:
            return self.is_freed or self.value.is_written
        return self.tensor is None or self.tensor._version != self.version or self.is_freed

    @property
    def is_freed(self) -> bool:
        """Return True if the memory of what was read is freed."""
        if self.value is not None:
            return self.value.is_freed
        # FSDP frees the memory of parameters between their forward and their backward.
        return self.tensor is not None and self.tensor.numel() > 0 and _is_freed(self.tensor)

    def read(self) -> torch.Tensor:
        """Return the tensor as the first execution read it."""
        if self.tensor is not None:
            found = self.tensor.detach()
        else:
            assert self.value is not None
            assert self.value.alias is not None
            assert self.extent is not None
            found = self.extent.within(self.value.alias)
        return found.requires_grad_(self.differentiable)


class Execution:
    """One execution of an operator, so that it can be repeated.

    Args:
        op: The operator.
        call: Runs the operator on its inputs by position.
        arguments: Its inputs by position.
        inputs: The tensors among them, in order.

    Attributes:
        size: Bytes of the storages that it made.
        cost: Seconds that it took.
        written: Numbers of the inputs that it wrote.
        values: The values that it made, by source; weak, as values keep their execution.
        count: How many tensors it returned and saved.
        random: States of the random generators before it, if it changed them.
    """

    def __init__(
        self,
        op: RematerializedOp,
        call: Callable[[Sequence[Any]], Any],
        arguments: Sequence[Any],
        inputs: list[Input],
    ) -> None:
        self.op, self.call = op, call
        numbers = iter(range(len(inputs)))
        self._arguments = map_tensors(list(arguments), lambda _: _Number(next(numbers)))
        self.inputs = inputs
        self.size, self.cost, self.count = 0, 0.0, 0
        self.written: set[int] = set()
        self.values: weakref.WeakValueDictionary[Source, Value] = weakref.WeakValueDictionary()
        self._devices = sorted({t.device.index for t in tensors_of(arguments) if t.is_cuda})
        self.random: list[torch.Tensor] = []
        kinds = sorted({t.device.type for t in tensors_of(arguments)})
        self._casts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]

    @contextmanager
    def noting_random(self) -> Iterator[None]:
        """Keep the states of the random generators if the operator changes them."""
        before = self._generators()
        yield
        if any(not torch.equal(*pair) for pair in zip(before, self._generators(), strict=True)):
            self.random = before

    @property
    def is_repeatable(self) -> bool:
        """Return True if its values can be computed again."""
        if self.written and self.op.word not in STATISTICS:
            return False
        return not any(one.is_lost for n, one in enumerate(self.inputs) if n not in self.written)

    def repeat(self) -> dict[Source, torch.Tensor]:
        """Run the operator again on the same values, and return what it returns and saves.

        The values of its inputs must be in memory.
        """
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> None:
            saved.append(tensor)

        tensors = [one.read() for one in self.inputs]
        for number in self.written:
            tensors[number] = tensors[number].clone()
        arguments = _put(self._arguments, tensors)
        with ExitStack() as stack:
            stack.enter_context(inside_routine())
            stack.enter_context(torch.enable_grad())
            for kind, dtype, enabled in self._casts:
                # Without its cache: what is cast here must not be used by the program.
                cast = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                stack.enter_context(cast)
            if self.random:
                stack.callback(self._set_generators, self._generators())
                self._set_generators(self.random)
            stack.enter_context(saved_tensors_hooks(pack, _unreachable))
            returned = tensors_of(self.call(arguments))
        found: dict[Source, torch.Tensor] = {("returned", n): t for n, t in enumerate(returned)}
        found |= {("saved", n): t for n, t in enumerate(saved)}
        saved.clear()  # The graph keeps `pack`, and would keep itself by it.
        return found

    def _generators(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


def _is_freed(tensor: torch.Tensor) -> bool:
    return not tensor.untyped_storage().nbytes()


class _Number(NamedTuple):
    """The place of a tensor among the inputs."""

    number: int


def _put(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Number):
        return tensors[value.number]
    if type(value) in (list, tuple):
        return type(value)(_put(item, tensors) for item in value)
    return value


def _unreachable(packed: Any) -> Any:
    raise AssertionError("the graph of a repeated operator is never used")
