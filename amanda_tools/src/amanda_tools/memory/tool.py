"""`Memory`: what operators allocate, how long it lives, and where the peak is.

Decides what is recorded when. `saved` finds the tensors that autograd saves, `ledger` accounts for
live buffers, and `result` has the result.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import replace
from time import perf_counter_ns as now
from typing import Any

from amanda_core import OpContext
from amanda_core.driver_kit.marks import without_context
from amanda_core.interface.facts import Facts, Storage
from amanda_core.runtime.weak import Known
from amanda_tools.kit.operators.entries import leaf_of
from amanda_tools.kit.operators.tool import OperatorTool, is_eager
from amanda_tools.kit.tensors.values import facts_of, tensors_in
from amanda_tools.memory.allocators import allocator_memory
from amanda_tools.memory.areas import Change, areas
from amanda_tools.memory.ledger import Ledger
from amanda_tools.memory.names import BufferNames
from amanda_tools.memory.result import AllocatingOp, MemoryResult, Moment, StepMemory
from amanda_tools.memory.saved import saved_tensors, sequence_numbers
from amanda_tools.memory.workspaces import Meter

__all__ = ["Memory"]

#: TensorFlow operators that return a variable's own buffer.
_VIEWS_OF_VARIABLES = frozenset({"ReadVariableOp", "VarHandleOp"})


_PER_CHANGE = 5
#: Zone of the operators that run while a model is built.
_BUILDING = "init"
#: How many executions with inputs of one size are measured: the first may fill caches of kernels.
_MEASURED = 2
#: Bytes up to which a workspace is not counted: PyTorch makes tensors of the numbers in `x * 2`.
_NUMBERS = 64
#: Sizes of inputs for which the workspace of an operator is kept, at most.
_INPUT_SIZES = 32
#: Zone -> kind of the buffers that its operators allocate.
_KINDS = {_BUILDING: "weights", "optimizer": "optimizer state"}


class Memory(OperatorTool["_Op"]):
    """Follows the memory that operators allocate: births, deaths, the peak, and its owners.

    A buffer counts once, however many tensors are views of it, and is live until the framework
    frees it. What autograd saves for backward is live until backward has used it. What a PyTorch
    operator allocates and frees while it runs is measured in its first executions with inputs of
    each size, and taken to be the same in later ones.

    Args:
        backward: Follow backward operators as well. Without it, what they allocate is not seen.
        everything: Include operators outside the model, such as those that create an optimizer's
            state.
        limit: Number of changes in the timeline; later ones are only counted.

    Raises:
        ValueError: `limit` is negative.

    >>> tool = Memory()
    """

    needs = ("ordered", "facts")
    immediate = True

    figures = dict.fromkeys(("peak", "live", "allocated"), "B")

    def __init__(
        self, backward: bool = True, everything: bool = True, limit: int = 100_000
    ) -> None:
        super().__init__(everything)
        if limit < 0:
            raise ValueError(f"limit must not be negative, but is {limit}")
        self.limit = limit
        self._by_number: list[_Op] = []
        self._ledger = Ledger(self._changed)
        self._steps: list[StepMemory] = []
        #: Five numbers of each change, so that nothing is left for Python's garbage collector to
        #: look through: time, number of the owner or -1, bytes, and the live bytes after it.
        self._changes = array("q")
        self._left_out = 0
        #: Bytes allocated while models were built.
        self._building = 0
        self.add_inst_for_op(self.analyse)
        if backward:
            self.add_inst_for_op(self.analyse_backward, backward=True)
        self._meter = Meter()
        self.add_inst_for_end(self._meter.close)
        self._names = BufferNames(self._name, self._meet_state)
        #: Leaves to whose gradients backward operators add.
        self._leaves: Known[None] = Known()
        self.add_inst_for_step(self.begin_step, self.end_step)

    def analyse(self, context: OpContext) -> None:
        """Insert routines that record what an operator allocates."""
        if not self.is_wanted(context):
            return
        with self._clock:
            op = self._op_of(context)
            if context.zone == "optimizer" and context.namespace.endswith("/compiled"):
                # It would be compiled again, and nothing in a graph says what it allocates. The
                # states that it leaves are met at the end of the step.
                self._names.read(context)
                self._notes.setdefault("not counted: buffers inside compiled steps of optimizers")
                return
            if op.is_eager:
                self._names.read(context)
                context.insert_before_op(self.take, observe=True, op=op)
            context.insert_after_op(self.give, observe=True, op=op)

    def analyse_backward(self, context: OpContext) -> None:
        """Insert routines that record what a backward operator allocates."""
        if not self.is_wanted(context):
            return
        with self._clock:
            op = self._op_of(context)
            if op.is_torch:
                # The gradient of a leaf is stored in the leaf and is not returned.
                leaf = leaf_of(context)
                if leaf is not None and self._leaves.set(leaf, None):
                    op.leaf = id(leaf)
            if op.is_eager:
                # Of values and sizes that were met before, nothing is recorded.
                arrive = op.tensors.unless_known(self.arrive, self._ledger.known, op.settled)
                context.insert_before_backward_op(arrive, observe=True, op=op)
            context.insert_after_backward_op(self.give_gradients, observe=True, op=op)

    @without_context
    def take(self, *inputs: Any, op: _Op) -> None:
        """Record the buffers that exist before an operator runs."""
        start = now()
        with self._lock:
            for position in op.weights:
                if position < len(inputs):  # Tools that are applied again know it by this.
                    self._leaves.get(inputs[position])
            op.sequence = op.next_sequence()
            self._begin(op, inputs, None, start)

    @without_context
    def give(self, *outputs: Any, op: _Op) -> None:
        """Record the outputs of an operator, and what autograd saves for its backward."""
        start = now()
        with self._lock:
            if op.is_eager:
                most = self._meter.end(op) if op.is_measured else None
                # Reading a variable returns its buffer without allocating one.
                owner = None if op.facts.type in _VIEWS_OF_VARIABLES else op
                saved = saved_tensors(outputs, op.sequence) if op.is_torch else ()
                values = (*outputs, *saved) if saved else outputs
                self._finish(op, values, owner, most, start)
            else:
                self._count_outputs(op, outputs, start)

    @without_context
    def arrive(self, *gradients: Any, op: _Op) -> None:
        """Record gradients that were created between operators, such as sums."""
        start = now()
        with self._lock:
            self._begin(op, gradients, op, start)

    @without_context
    def give_gradients(self, *gradients: Any, op: _Op) -> None:
        """Record the outputs of a backward operator."""
        start = now()
        with self._lock:
            if op.is_eager:
                most = self._meter.end(op) if op.is_measured else None
                leaf = None if op.leaf is None else self._leaves.value(op.leaf)
                values = gradients if leaf is None else (*gradients, leaf.grad)
                self._finish(op, values, op, most, start)
            else:
                self._count_outputs(op, gradients, start)

    def begin_step(self, number: int) -> None:
        """Record the start of a step."""
        with self._lock:
            self._ledger.settle()
            self._steps.append(StepMemory(number, peak=self._ledger.live))

    def end_step(self, number: int) -> None:
        """Record the end of a step."""
        with self._lock:
            self._names.end_step()
            self._ledger.settle()
            if self._steps:
                self._steps[-1].live = self._ledger.live

    def result(self) -> MemoryResult:
        """Return what has been recorded so far."""
        with self._lock:
            ledger = self._ledger
            ledger.settle()
            at_peak = ledger.at_peak
            ops = [
                replace(
                    op.facts,
                    at_peak=at_peak.get(number, 0),
                    live=ledger.by_owner[number],
                    holds=_first_of(list(op.holds)),
                )
                for number, op in enumerate(self._by_number)
                if op.facts.calls
            ]
            if self._steps:
                self._steps[-1].live = ledger.live
            peak_op = None
            if ledger.peak_owner is not None:
                peak_op = self._by_number[ledger.peak_owner].facts.name
            changes = list(zip(*[iter(self._changes)] * _PER_CHANGE, strict=True))
            return MemoryResult(
                ledger.peak,
                peak_op,
                ledger.live,
                ledger.given_peak,
                ops,
                [replace(step) for step in self._steps if step.allocated or step.output],
                list(self._notes),
                self._left_out,
                self._clock.spent / 1e9,
                self._clock.wall / 1e9,
                [Moment(when, live, given) for when, _, _, live, given in changes],
                {kind or "other": size for kind, size in ledger.kinds_at_peak.items()},
                self._building,
                areas(
                    [
                        Change(when, None if owner < 0 else owner, size)
                        for when, owner, size, _, _ in changes
                    ],
                    [op.home for op in self._by_number],
                ),
                allocator_memory({op.facts.namespace.partition("/")[0] for op in self._by_number}),
            )

    def _name(self, buffer: Hashable, name: str) -> None:
        owner = self._ledger.owner_of(buffer)
        if owner is not None:
            self._by_number[owner].holds[name] = None

    def _op_of(self, context: OpContext) -> _Op:
        op = self.account_of(context, lambda: self._new_op(context))
        if not op.is_eager:
            self._notes.setdefault(
                f"{context.namespace}: which buffers a graph uses, and how long, is the "
                "framework's own; only the size of outputs is counted"
            )
        return op

    def _new_op(self, context: OpContext) -> _Op:
        op = _Op(AllocatingOp.of(context), facts_of(context), len(self._by_number))
        op.waits = "wait" in context
        if not context.is_backward():
            roles = context.get("input_roles", ())
            op.weights = {p for p, role in enumerate(roles) if role in ("weight", "bias")}
        self._by_number.append(op)
        return op

    def _begin(self, op: _Op, values: Sequence[Any], owner: _Op | None, start: int) -> None:
        """Record the inputs of an operator, and start to measure it, unless its workspace is known
        for inputs of this size.
        """
        ledger = self._ledger
        if ledger.dead:
            ledger.settle()
        size, new, problem = op.storages(values, ledger.known)
        if new or problem:
            self._meet(op, values, owner, new, problem)
        op.live, op.input_size, op.has_begun = ledger.live, size, True
        op.is_measured = False
        clock = self._clock  # Which analysis has begun.
        clock.last = now()
        clock.spent += clock.last - start
        if op.is_torch:
            known = op.workspaces.get(size)
            # The program computes other things before it waits for the end of a collective.
            if (known is None or known[0] < _MEASURED) and not op.waits:
                op.is_measured = self._meter.begin(op, op.facts.phase == "backward")

    def _finish(
        self, op: _Op, values: Sequence[Any], owner: _Op | None, most: int | None, start: int
    ) -> None:
        """Record what an operator returned or saved, and what it had besides.

        Args:
            op: The operator.
            values: What it returned or saved.
            owner: Who allocated that.
            most: What it had at most, if that was measured.
            start: When the routine began.
        """
        facts, ledger = op.facts, self._ledger
        before = facts.allocated
        if ledger.dead:
            ledger.settle()
        _, new, problem = op.storages(values, ledger.known)
        if new or problem:
            self._meet(op, values, owner, new, problem)
        times, extra = _MEASURED, 0
        if op.has_begun:
            times, extra = op.workspaces.get(op.input_size, (0, 0))
            if times >= _MEASURED and extra <= _NUMBERS:
                op.settled.add(op.input_size)
        if most is not None or extra > _NUMBERS:
            self._add_workspace(op, most, facts.allocated - before)
        elif not times:
            facts.not_measured += op.is_measured is False
        facts.calls += 1
        if ledger.live > facts.live_after:
            facts.live_after = ledger.live
        op.has_begun = op.is_measured = False
        clock = self._clock
        clock.last = now()
        clock.spent += clock.last - start

    def _add_workspace(self, op: _Op, most: int | None, results: int) -> None:
        """Record what an operator had besides its results.

        Args:
            op: The operator.
            most: What it had at most, if that was measured.
            results: Bytes of the new buffers that it returned or saved.
        """
        times, extra = op.workspaces.get(op.input_size, (0, 0))
        if most is not None:
            if len(op.workspaces) >= _INPUT_SIZES:
                op.workspaces.clear()
                op.settled.clear()
            extra = max(0, most - results)
            op.workspaces[op.input_size] = times + 1, extra
        if extra > _NUMBERS:
            facts, live = op.facts, op.live + results + extra
            workspace = self._ledger.reach(live, op.number, now())
            facts.largest_workspace = max(facts.largest_workspace, workspace)
            if self._steps and facts.zone != _BUILDING:
                self._steps[-1].peak = max(self._steps[-1].peak, live)

    def _meet(
        self,
        op: _Op,
        values: Sequence[Any],
        owner: _Op | None,
        new: list[Storage],
        problem: str,
    ) -> None:
        """Record the buffers of values of an operator that the ledger does not know."""
        if problem:
            self._notes.setdefault(f"not counted: {problem}")
        if owner is None:
            self._meet_given(op, values, new)
            return
        when, ledger = now(), self._ledger
        for storage in new:
            more = ledger.meet(storage, owner.number, when, owner.kind)
            if more:
                self._allocate(owner.facts, more)

    def _meet_state(self, facts: Facts, value: Any) -> None:
        """Record a state of an optimizer that existed before, or was allocated in a graph."""
        for storage in facts.storages([value], self._ledger.known)[1]:
            self._ledger.meet(storage, None, now(), _KINDS["optimizer"])

    def _meet_given(self, op: _Op, values: Sequence[Any], new: list[Storage]) -> None:
        """Record buffers that existed before, those of weights by this kind."""
        weights = [value for position, value in enumerate(values) if position in op.weights]
        keys = {storage.key for storage in op.tensors.storages(weights, {})[1]}
        when = now()
        for storage in sorted(new, key=lambda storage: storage.key in keys):
            self._ledger.meet(storage, None, when, "weights" if storage.key in keys else "")

    def _allocate(self, facts: AllocatingOp, size: int) -> None:
        facts.allocated += size
        facts.buffers += 1
        if facts.zone == _BUILDING:
            self._building += size
        elif self._steps:
            step, live = self._steps[-1], self._ledger.live
            step.allocated += size
            if live > step.peak:
                step.peak = live

    def _count_outputs(self, op: _Op, values: Sequence[Any], start: int) -> None:
        op.facts.calls += 1
        op.facts.graph_calls += 1
        for _, tensor in tensors_in(op.tensors, values):
            size = op.tensors.nbytes(tensor) or 0
            op.facts.output += size
            if self._steps:
                self._steps[-1].output += size
        self._clock.add(start, now())

    def _changed(self, when: int, owner: int | None, size: int) -> None:
        if len(self._changes) < _PER_CHANGE * self.limit:
            ledger, number = self._ledger, -1 if owner is None else owner
            self._changes.extend((when, number, size, ledger.live, ledger.given))
        else:
            self._left_out += 1


class _Op:
    def __init__(self, facts: AllocatingOp, tensors: Facts, number: int) -> None:
        self.facts, self.tensors, self.number = facts, tensors, number
        self.is_torch = facts.namespace.startswith("pytorch/")
        #: Whether the memory of its values is visible.
        self.is_eager = is_eager(facts.namespace)
        #: Returns the sequence number of PyTorch's next node, and what it was before it ran.
        self.next_sequence = sequence_numbers() if self.is_torch else int
        self.sequence = 0
        self.storages = tensors.storages
        #: Live bytes before it runs, and the size of its inputs.
        self.live = self.input_size = 0
        #: Whether it is being measured; None inside of another one that is.
        self.is_measured: bool | None = False
        #: Whether it is a collective.
        self.waits = False
        #: Size of the inputs -> number of measurements, and bytes of the workspace in the last one.
        self.workspaces: dict[int, tuple[int, int]] = {}
        #: Sizes of the inputs for which no workspace is counted any more.
        self.settled: set[int] = set()
        #: Whether its inputs were recorded in this execution.
        self.has_begun = False
        #: Key of the tensor to whose gradient it adds.
        self.leaf: int | None = None
        #: Names of the parameters and states that its buffers are.
        self.holds: dict[str, None] = {}
        #: Positions of the inputs that are weights.
        self.weights: set[int] = set()
        #: Kind of the buffers that it allocates.
        zone = _KINDS.get(facts.zone, "activations")
        self.kind = "gradients" if facts.phase == "backward" else zone

    @property
    def home(self) -> str:
        """Its module, or the part of the program in which it is, for the timeline."""
        zone = "building" if self.facts.zone == _BUILDING else self.facts.zone
        return self.facts.module or f"({'no module' if zone == 'model' else zone})"


def _first_of(names: list[str]) -> str:
    """Return the first of the names, and how many more there are."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else "".join(names)
