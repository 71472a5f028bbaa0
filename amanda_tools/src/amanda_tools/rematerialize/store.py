"""`Store`: which values are in memory, within a budget.

Owns the accounting, and the eviction and restoring of values, which are one piece: each decides on
what the other counts. Deciding which operators take part is `tool`'s.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from amanda_core.errors import AmandaError
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_tools.memory.ledger import Ledger
from amanda_tools.rematerialize.evictable import Evictable
from amanda_tools.rematerialize.executions import (
    STATISTICS,
    Execution,
    Extent,
    Input,
    Source,
    Value,
    map_tensors,
    tensors_of,
)
from amanda_tools.rematerialize.policy import Heuristic, choose
from amanda_tools.rematerialize.result import RematerializedOp
from amanda_tools.rematerialize.saving import Handle, Writes, packing

__all__ = ["BudgetError", "Store"]

_Versions: TypeAlias = list[tuple[weakref.ref[torch.Tensor], int]]

#: How many copies of the states of random generators are in memory while an operator runs.
_STATES = 5


class BudgetError(AmandaError, MemoryError, slug="memory-budget"):
    """The values that must be in memory at the same time do not fit into the budget."""


class Store:
    """Keeps what autograd saves within a budget, and computes evicted values again.

    Args:
        budget: Bytes; None for no limit.
        heuristic: Which value to evict.
        strict: Raise if the budget is not enough, instead of exceeding it.
        facts: The driver's facts about tensors.

    Attributes:
        peak: Maximum of the bytes in use, with what the running operator makes.
        computed: Seconds that operators took the first time.
        repeated: Seconds that they took again.
    """

    def __init__(
        self, budget: int | None, heuristic: Heuristic, strict: bool, facts: Facts
    ) -> None:
        self.budget, self.heuristic, self.strict = budget, heuristic, strict
        self.peak = 0
        self.computed = self.repeated = 0.0
        self._facts = facts
        self._ledger = Ledger(lambda *_: None)
        #: Storage -> a weak reference to it, and the value that it is.
        self._known: dict[int, tuple[weakref.ref[Any], Value]] = {}
        #: The values in memory.
        self._memory = Evictable(facts.users)
        #: Kind of call -> bytes of the storages that it makes.
        self._sizes: dict[object, int] = {}
        #: Bytes of the gradients that the running backward operator is going to make.
        self._reserved = 0
        #: Parameter that no operator has read yet -> its size; the sum of these.
        self._unread: dict[str, int] = {}
        self._unread_size = 0
        #: What the running operator may write: weak references, and versions before.
        self._exposed: _Versions = []
        #: Maximum of the bytes that a repeated operator reads and makes.
        self._largest = 0
        #: The values that are going to be computed again while one is restored.
        self._planned: set[Value] = set()
        #: Those that these are computed from, and how many of these read each.
        self._readers: Counter[Value] = Counter()
        #: Those that have been computed again meanwhile.
        self._computed: set[Value] = set()

    # Accounting.

    @property
    def used(self) -> int:
        """The bytes of all storages in use that have been seen."""
        self._ledger.settle()
        return self._ledger.live + self._ledger.given + self._unread_size

    @property
    def floor(self) -> int:
        """Maximum of the bytes that could not have been evicted, with those that restoring what
        backward reads takes: a budget that is large enough.
        """
        self._memory.verify()
        # Within what is used without a budget, nothing has to be restored.
        return min(self._memory.floor, self._memory.total if self.budget is None else sys.maxsize)

    def expect(self, parameters: Mapping[str, int]) -> None:
        """Count parameters that operators have not read yet: name -> size in bytes."""
        for name, size in parameters.items():
            self.meet(name)
            self._unread[name] = size
            self._unread_size += size

    def meet(self, parameter: str) -> None:
        """Note that an operator is about to read a parameter."""
        self._unread_size -= self._unread.pop(parameter, 0)

    def see(self, values: Any, *, new: bool = True) -> None:
        """Count the storages of tensors."""
        for tensor in tensors_of(values):
            try:
                storage = self._facts.storage(tensor)
            except NotReadableError:
                continue
            if storage is not None:
                owner = 0 if new else None
                self._ledger.meet(storage, owner, time.perf_counter_ns())
        self.peak = max(self.peak, self.used)

    def begin_write(self, values: Any) -> None:
        """Note that an operator runs that may write these."""
        self._exposed = _versions(values) if self._memory.held else []

    def end_write(self) -> None:
        """End what `begin_write` began."""
        exposed, self._exposed = self._exposed, []
        self._note_writes(exposed)

    def _note_writes(self, exposed: _Versions) -> None:
        for reference, before in exposed:
            tensor = reference()
            if tensor is None or tensor._version == before:
                continue
            storage = _storage(tensor)
            if storage is not None:
                _, value = self._known.get(storage, (None, None))
                self._memory.note_write(storage, before, value)

    def begin_backward(self, op: RematerializedOp) -> None:
        """Make room for the gradients that the backward of an operator is going to make."""
        self._reserved = op.gradients
        self._make_room(0, f"the backward of {op.name}", op.saved + self._largest)

    def end_backward(self) -> None:
        """End what `begin_backward` began."""
        self._reserved = 0

    # Running operators.

    def run(
        self,
        op: RematerializedOp,
        call: Callable[[Sequence[Any]], Any],
        values: Sequence[Any],
        weights: Collection[int] = (),
    ) -> Any:
        """Run an operator within the budget, and keep what it saves for backward as values.

        Args:
            op: The operator.
            call: Runs it on its inputs by position.
            values: The inputs.
            weights: Positions of weights. A tool may have edited them; they are kept.
        """
        tensors = tensors_of(list(values))
        self.see(tensors, new=False)
        if not all(map(_is_dense, tensors)):
            return call(values)
        kind = (op.id, op.name, *(_kind(tensor) for tensor in tensors))
        if kind not in self._sizes:
            self._sizes[kind] = _predicted(call, values)
        self._make_room(self._sizes[kind], op.name)
        op.calls += 1
        versions = _versions(tensors)
        if not _saves(tensors):
            result = call(values)
            self.see(result)
        else:
            execution = Execution(op, call, values, self._inputs(values, weights))
            result = self._run_saving(execution, values, tensors)
            self._sizes[kind] = execution.size
        self._note_writes(versions)
        return result

    def _run_saving(
        self, execution: Execution, values: Sequence[Any], tensors: Sequence[torch.Tensor]
    ) -> Any:
        """Run an operator for the first time, and keep what it returns and saves as values."""
        op, inputs = execution.op, execution.inputs
        writes = Writes(tensors, op.word in STATISTICS)
        handles, pack = packing(self)
        with execution.noting_random(), saved_tensors_hooks(pack, Handle.unpack):
            start = time.perf_counter()
            result = execution.call(values)
            execution.cost = time.perf_counter() - start
        self.computed += execution.cost
        execution.written |= writes.found()
        made: dict[Source, torch.Tensor] = {
            **{("returned", n): tensor for n, tensor in enumerate(tensors_of(result))},
            **{("saved", n): tensor for n, (_, tensor) in enumerate(handles)},
        }
        execution.count = len(made)
        saved = {_storage(tensor) for _, tensor in handles}
        for number, tensor in enumerate(tensors):
            if inputs[number].is_lost and _storage(tensor) in saved:
                # Autograd keeps it in any case.
                inputs[number] = inputs[number]._replace(tensor=tensor.detach())
        self._add_values(execution, made, {_storage(tensor) for tensor in tensors})
        self.see([*made.values(), *execution.random])
        for handle, tensor in handles:
            self._pack(handle, tensor, op)
        self._note_sizes(execution, tensors, [handle.value for handle, _ in handles])
        handles.clear()
        return result

    def _note_sizes(
        self,
        execution: Execution,
        tensors: Sequence[torch.Tensor],
        saved: Sequence[Value | None],
    ) -> None:
        """Note the sizes by which room is made: of what was made, saved, read, and of gradients."""
        op, size = execution.op, execution.size
        op.made = max(op.made, size)
        op.saved = sum(value.size for value in {one: None for one in saved if one is not None})
        read = {one.value: None for one in execution.inputs if one.value is not None}
        self._largest = max(self._largest, sum(value.size for value in read) + size)
        op.gradients = sum(t.nbytes for t in tensors if t.requires_grad) + size

    def _inputs(self, values: Sequence[Any], weights: Collection[int]) -> list[Input]:
        """Return how the inputs of a call are found again."""
        inputs = [
            self._input(tensor, position in weights)
            for position, value in enumerate(values)
            for tensor in tensors_of(value)
        ]
        for one in inputs:
            if one.value is not None:
                one.value.last_access = self._now
        return inputs

    def _input(self, tensor: torch.Tensor, is_weight: bool) -> Input:
        value = self._value(tensor)
        differentiable = tensor.requires_grad
        if value is None:
            # An intermediate result that an in-place operator made would live longer by this.
            kept = tensor.detach() if is_weight or not _is_intermediate(tensor) else None
            return Input(None, None, kept, tensor._version, differentiable)
        return Input(value, Extent.of(tensor), None, 0, differentiable)

    def _value(self, tensor: torch.Tensor) -> Value | None:
        """Return the value in which a tensor lies, if it has not been written since."""
        storage = _storage(tensor)
        found = self._known.get(storage) if storage is not None else None
        if found is None or tensor._version != found[1].version:
            return None
        return found[1]

    def _add_values(
        self, execution: Execution, made: Mapping[Source, torch.Tensor], others: set[int | None]
    ) -> None:
        """Make values of the storages that an execution made, unless it cannot be repeated."""
        repeatable, seen = execution.is_repeatable, set(others)
        for source, tensor in made.items():
            storage = _storage(tensor)
            if storage is None or storage in seen:
                continue
            seen.add(storage)
            execution.size += tensor.untyped_storage().nbytes()
            if repeatable:
                execution.values[source] = self._new_value(execution, tensor, storage)

    def _new_value(self, execution: Execution, tensor: torch.Tensor, storage: int) -> Value:
        memory = tensor.untyped_storage()
        value = Value(execution, tensor, memory.nbytes())
        value.last_access = self._now
        self._memory.watch(value, tensor)
        known = self._known

        def died(_: object) -> None:
            known.pop(storage, None)

        known[storage] = weakref.ref(memory, died), value
        return value

    # What autograd saves.

    def _pack(self, handle: Handle, tensor: torch.Tensor, op: RematerializedOp) -> None:
        value = self._value(tensor)
        if value is None:
            # An alias, since the graph of a saved output would refer to itself.
            handle.tensor, handle.version = tensor.detach(), tensor._version
            return
        handle.value, handle.extent = value, Extent.of(tensor)
        value.handles += 1
        if value.alias is None:
            self._hold(value, tensor, op)

    def _hold(self, value: Value, tensor: torch.Tensor, op: RematerializedOp) -> None:
        value.alias, value.version = tensor.detach(), tensor._version
        self._memory.watch(value, tensor)
        self._memory.hold(value, op)

    def read(self, value: Value) -> torch.Tensor:
        """Return an alias of a value's storage; compute the value again if it was evicted."""
        if value.alias is None:
            self._restore(value)
        assert value.alias is not None
        value.last_access = self._now
        self._memory.look_again(value)
        return value.alias

    def drop(self, value: Value) -> None:
        """Forget a tensor that lies in a value; the last one frees the value."""
        value.handles -= 1
        self._release_unused(value)

    def _release_unused(self, value: Value) -> None:
        if not value.handles and not value.locks and value not in self._readers:
            self._release(value)

    def _release(self, value: Value) -> None:
        if value.alias is not None:
            self._memory.release(value)
            value.alias = None
            value.evict()

    # Eviction and restoring.

    @property
    def _now(self) -> float:
        return self.computed + self.repeated

    def _make_room(self, size: int, what: str, later: int = 0) -> None:
        """Evict values until `size` more bytes, and the reserved ones, fit into the budget.

        Args:
            size: Bytes that are going to be allocated.
            what: What needs them.
            later: Bytes of values that are going to be restored meanwhile.
        """
        needed = size + self._reserved + _STATES * torch.get_rng_state().nbytes
        memory = self._memory
        memory.settle()
        memory.require(self.used + needed, later)
        while self.budget is not None and self.used + needed > self.budget:
            candidates = self._candidates()
            if not candidates and not self.strict:
                break
            if not candidates:
                memory.floor = max(memory.floor, self.used + needed)
                raise BudgetError(
                    f"{what} needs {needed:,} bytes beside {self.used:,} bytes that cannot be "
                    f"evicted, and the budget is {self.budget:,} bytes",
                    where="rematerialize",
                    fix=f"At least {self.floor:,} bytes are needed so far. Run it once without a "
                    "budget: the result says one that is enough for the steps that it measured. "
                    "Measure this step, too, by `--steps 0:` or `where(amanda.select(steps=...))`",
                )
            value = choose(candidates, self.heuristic, self._now)
            if not memory.is_evictable(value):
                memory.look_again(value)
                continue
            memory.held[value].evicted += 1
            self._release(value)
            if value in self._readers:
                self._plan(value)
        self.peak = max(self.peak, self.used + size)

    def _candidates(self) -> list[Value]:
        """Return the values to choose from: those that are going to be read again as a last resort.

        A value that was computed again and is still going to be read is kept if others can go.
        Computing it for each of its readers would take a time that grows exponentially in recurrent
        networks.
        """
        memory = self._memory
        unread = [value for value in memory.found if value not in self._readers]
        # If the budget is exceeded anyway, the last resort would only cost time.
        exceeded = self.budget is not None and memory.floor > self.budget
        if unread or (exceeded and not self.strict):
            return unread
        return [value for value in memory.found if value not in self._computed] or [*memory.found]

    def _restore(self, value: Value) -> None:
        # Not recursive: a chain of operators may be longer than Python's stack.
        stack: list[tuple[Value, list[Value]]] = [(value, [])]
        is_last_resort = False
        self._plan(value)
        try:
            while stack:
                wanted, locked = stack[-1]
                parents = [one for one in wanted.sources if one not in locked]
                # What is in memory is locked last: computing the others may need the room.
                missing = next((one for one in parents if one.alias is None), None)
                if wanted.alias is None and missing is not None:
                    stack.append((missing, []))
                    continue
                if wanted.alias is None:
                    for parent in parents:
                        self._memory.lock(parent)
                        locked.append(parent)
                    try:
                        self._repeat(wanted)
                    except BudgetError:
                        if is_last_resort:
                            raise
                        # Other inputs that are waiting in memory are computed a second time.
                        is_last_resort = True
                        for _, waiting in stack[:-1]:
                            self._unlock(waiting)
                            waiting.clear()
                        continue
                stack.pop()
                self._unlock(locked)
                if stack:
                    self._memory.lock(wanted)
                    stack[-1][1].append(wanted)
        finally:
            kept = list(self._readers)
            for state in (self._planned, self._readers, self._computed):
                state.clear()
            for _, locked in stack:
                self._unlock(locked)
            for one in kept:
                self._release_unused(one)

    def _plan(self, value: Value) -> None:
        """Note which values are going to be read, and by how many, to restore this one."""
        left = [value]
        while left:
            if (one := left.pop()) in self._planned:
                continue
            self._planned.add(one)
            for source in one.sources:
                self._readers[source] += 1
                if source.alias is None:
                    left.append(source)

    def _note_computed(self, value: Value) -> None:
        self._computed.add(value)
        if value not in self._planned:
            return
        self._planned.remove(value)
        for source in value.sources:
            self._readers[source] -= 1
            if not self._readers[source]:
                del self._readers[source]
                self._release_unused(source)

    def _unlock(self, values: list[Value]) -> None:
        for value in values:
            self._memory.unlock(value)
            self._release_unused(value)

    def _repeat(self, wanted: Value) -> None:
        execution = wanted.execution
        if not execution.is_repeatable:
            raise BudgetError(
                f"A value of {execution.op.name} cannot be computed again, because one of its "
                "inputs was written, or its memory freed, after it had been evicted",
                where="rematerialize",
                fix="Call backward before the parameters or buffers are written, and leave out "
                "by where= the modules whose parameters are freed, as by FSDP",
            )
        op = execution.op
        self._make_room(execution.size, op.name)
        start = time.perf_counter()
        made = execution.repeat()
        self.repeated += time.perf_counter() - start
        op.repeated += 1
        if len(made) != execution.count:
            raise BudgetError(
                f"{execution.op.name} saved other tensors when it ran again",
                where="rematerialize",
                fix="Restrict the tool to other operators by where=",
            )
        for source, value in list(execution.values.items()):
            is_used = value.handles or value.locks or value is wanted or value in self._readers
            if value.alias is None and is_used:
                value.restore()
                self._hold(value, made[source], op)
                self._note_computed(value)
        self.see(list(made.values()))


def _saves(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if autograd saves tensors here that can be computed again.

    False if the program decides itself what is saved, as checkpoints do, or where tangents of
    forward-mode differentiation are saved, too.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return False
    if forward_ad._current_level >= 0:
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def _versions(values: Any) -> _Versions:
    return [(weakref.ref(one), one._version) for one in tensors_of(values) if _is_dense(one)]


def _is_intermediate(tensor: torch.Tensor) -> bool:
    try:
        return tensor.requires_grad and not tensor.is_leaf
    except RuntimeError:
        return True  # A view that was made without gradients and written with them.


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True for a tensor whose values lie in one storage, as they are."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_nested:
        return False
    strange = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference()
    return not strange and tensor.layout is torch.strided and tensor.device.type != "meta"


def _storage(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's storage; None if it has none that can be given back."""
    if not _is_dense(tensor):
        return None
    memory = tensor.untyped_storage()
    return int(memory._cdata) if memory.nbytes() else None


def _kind(tensor: torch.Tensor) -> object:
    return tensor.dtype, tensor.shape, tensor.requires_grad


def _predicted(call: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> int:
    """Return how many bytes an operator is going to allocate, found by running it without data.

    If it cannot run so, the answer is the size of its inputs.
    """
    made: list[torch.Tensor] = []

    def without_data(tensor: torch.Tensor) -> torch.Tensor:
        empty = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        return empty.requires_grad_(tensor.requires_grad)

    state = torch.get_rng_state()
    try:
        given = map_tensors(list(values), without_data)
        with saved_tensors_hooks(made.append, lambda packed: packed):
            made += tensors_of(call(given))
        theirs = {tensor.untyped_storage()._cdata for tensor in tensors_of(given)}
        sizes = {
            storage._cdata: storage.nbytes()
            for storage in (tensor.untyped_storage() for tensor in made)
        }
        return sum(size for storage, size in sizes.items() if storage not in theirs)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return sum(tensor.nbytes for tensor in tensors_of(list(values)))
    finally:
        made.clear()  # See `Store.run`.
        torch.set_rng_state(state)
