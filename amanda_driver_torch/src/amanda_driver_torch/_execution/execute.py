"""One execution of one operator: analysis, edits before, the op or its replacement, edits after.

Owns the order of these, and the straight-through meaning of edits for ordinary ops, in-place ops
and `out=`. The sites identify the call; `_autograd` handles gradients. The module is a little over
650 lines because it covers one execution from beginning to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from amanda_core import IPoint, OpContext, Plan, Session, Step
from amanda_core.driver_failures import OriginalCall
from amanda_core.errors import EditError, RoutineResultError, UnsupportedError, is_annotated
from amanda_core.threads import standing_for
from amanda_driver_torch._autograd.backward import Backward
from amanda_driver_torch._autograd.driver_nodes import copy_saved, keep_saved
from amanda_driver_torch._autograd.edits import check_written, edited
from amanda_driver_torch._autograd.nodes import made, new_nodes, tensors_in
from amanda_driver_torch._autograd.records import OpRecord
from amanda_driver_torch._autograd.replaced_backward import run_with_replaced_backward
from amanda_driver_torch._autograd.taps import Taps
from amanda_driver_torch._execution.native_plans import are_native, compiled
from amanda_driver_torch._execution.pending_hooks import LaterHooks, later_hooks
from amanda_driver_torch._execution.viewing import passes_weights_on
from amanda_driver_torch._operators.bindings import IN_PLACE_METADATA
from amanda_driver_torch._operators.operator import Operator
from amanda_driver_torch._operators.signature import BoundCall, bind, outputs_of, restructure
from amanda_driver_torch._thread.modes import call_routine, changes_of, resumed_modes
from amanda_driver_torch._thread.points import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    BEFORE_BACKWARD,
    BEFORE_FORWARD,
)
from amanda_driver_torch._thread.state import STATE
from amanda_driver_torch._torch.internals import (
    is_grad_enabled,
    is_inference_mode_enabled,
    next_sequence,
    version_of,
)
from amanda_driver_torch._torch.tensor_attributes import (
    base_of,
    is_weight,
    memory_of,
    requires_grad,
)

__all__ = ["Execution", "Run"]


class Execution:
    """Executes operators for one attachment.

    Args:
        session: The session.
        backward: The backward program.
        constant: Returns a value that is the same in every execution of its op, else None.
        note_unseen: Records what an observer did not see, and why.
        hides: Returns True if torch turns a TypeError in an op's call into NotImplemented.

    Attributes:
        watch: The native extension's part of the interceptor, or None.
        edits: Number of values edited and operators replaced so far.
    """

    def __init__(
        self,
        session: Session,
        backward: Backward,
        constant: Callable[[Any], Any],
        note_unseen: Callable[[str, str], None],
        hides: Callable[[Operator, OpRecord], bool],
    ) -> None:
        self.session, self.backward = session, backward
        self.constant, self.note_unseen, self._hides = constant, note_unseen, hides
        self.watch: Any = None
        self.edits = 0

    def __call__(
        self,
        record: OpRecord,
        operator: Operator,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Execute one call of `operator`, which may be idle, and return its result.

        Args:
            record: The op's record.
            operator: The operator.
            call: Runs the original.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        session = self.session
        if record.idle_epoch == session.epoch and session.caching:
            if not session.wants_backward or not is_grad_enabled():
                return call(*args, **kwargs)
            start = next_sequence()
            result = call(*args, **kwargs)
            if next_sequence() - start == record.idle_nodes:
                return result
            return self.settle(record, operator, args, kwargs, result, start)
        original = session.failures.original(call)
        return self.run(record, operator, original, args, kwargs)

    def run(
        self,
        record: OpRecord,
        operator: Operator,
        original: OriginalCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        go_on: Callable[[Run], object] | None = None,
        by_native: bool = False,
    ) -> Any:
        """Execute a call of an op; if the driver itself fails, fall back to the original where that
        is allowed.

        Args:
            record: The op's record.
            operator: The operator.
            original: Runs the original.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            go_on: Sets how far the call was executed already.
            by_native: Whether the native interceptor calls it, which executes compiled plans.
        """
        try:
            run = Run(self, record, operator, original, args, kwargs, by_native)
            if go_on is not None:
                go_on(run)
            return run.result()
        except Exception as error:
            failures, site = self.session.failures, record.site
            if not failures.is_drivers(error, original):
                if (
                    isinstance(error, TypeError)
                    and is_annotated(error)
                    and self._hides(operator, record)
                ):
                    self.session.defer(error)
                raise
            return failures.recover(error, site.namespace, site.name, original, args, kwargs)
        finally:
            original.forget()

    def resume(
        self,
        record: OpRecord,
        operator: Operator,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        edited: list[Any] | None,
        before: tuple[Any, ...],
        after: tuple[Any, ...],
        returned: Any,
        start: int,
        tapped: bool,
    ) -> Any:
        """Continue a call that the native interceptor has executed in part.

        Args:
            record: The op's record.
            operator: The operator.
            call: Runs the original.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            edited: The values that the original ran on, if routines edited some.
            before: Results of the first routines before the op.
            after: Results of the first routines after the op.
            returned: The original's return value, or None if it was not called.
            start: Sequence number before that call.
            tapped: Whether hooks for gradients of inputs were prepared in that call.
        """
        original = self.session.failures.original(call)

        def go_on(run: Run) -> None:
            run.done_before, run.done_after = before, after
            if edited is not None:
                # The op may have handed one of them back.
                run.values, run.edited, run.intact = edited, True, False
            if returned is not None:
                run.call, run.start = (lambda *_, **__: returned), start
                run.called, run.tapped = True, tapped

        if returned is not None:
            original.keep(returned)
        return self.run(record, operator, original, args, kwargs, go_on)

    def settle(
        self,
        record: OpRecord,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        start: int,
    ) -> Any:
        """Analyse the nodes of an idle op that made other nodes than when it was found idle."""
        try:
            outputs = outputs_of(result)
            if self._hook_as_before(record, outputs, start):
                return result
            made_nodes = next_sequence() - start
            if made_nodes != record.idle_nodes and record.context is not None:
                bound = bind(operator.func, args, kwargs)
                if result is None and _is_whole(bound):
                    outputs = bound.values[:1]
                if self._hook_as_before(record, outputs, start, bound):
                    return result
                # The remembered constants are those of another execution.
                record.context.remember_constants()
                planned = self._plan(record, record.context, bound, outputs, start)
                if planned and self._hook_as_before(record, outputs, start, bound):
                    return result
                if self._track(record, record.context, bound, outputs, start):
                    record.idle_nodes = made_nodes
                elif not planned:
                    record.hooks = later_hooks(
                        self.backward, self.watch, record, record.context, bound, outputs, start
                    )
        except Exception as error:
            failures, site = self.session.failures, record.site
            if not failures.is_drivers(error):
                raise
            failures.note(error, site.namespace, site.name)
        return result

    def edit(self, step: Step, values: list[Any], result: Any, aliases: bool) -> None:
        """Apply a routine's result to `values`; called by the native interceptor."""
        changes = step.changes(values, result)
        self.edits += len(changes)
        for position, new in changes:
            values[position] = edited(values[position], new, step, node=aliases)

    def _track(
        self,
        record: OpRecord,
        context: OpContext,
        bound: BoundCall,
        outputs: Sequence[Any],
        start: int,
        tapped: bool = False,
    ) -> bool:
        tensors = made(bound, outputs)
        return self.backward.track(record.nodes, context, tensors, start, tapped=tapped)

    def _plan(
        self,
        record: OpRecord,
        context: OpContext,
        bound: BoundCall,
        outputs: Sequence[Any],
        start: int,
    ) -> bool:
        """Make the plans of the op's nodes if all of them were analysed; return False otherwise.

        If they all need no hook, there are no plans.
        """
        nodes, session = record.nodes.values(), self.session
        if all(n.idle(session) for n in nodes) or not all(n.analysed(session) for n in nodes):
            return False
        record.hooks = later_hooks(
            self.backward, self.watch, record, context, bound, outputs, start
        )
        return True

    def _hook_as_before(
        self,
        record: OpRecord,
        outputs: Sequence[Any],
        start: int,
        bound: BoundCall | None = None,
    ) -> bool:
        """Set hooks as in an earlier execution; return False if this one is unlike it."""
        hooks: Any = record.hooks
        if (
            hooks is None
            or isinstance(hooks, tuple)
            or self.backward.second_order
            or not self.session.caching
        ):
            return False
        if isinstance(hooks, LaterHooks) and hooks.written:
            if bound is None:
                return False
            outputs = made(bound, outputs)
        is_plain = all(type(output) is torch.Tensor for output in outputs)
        return is_plain and hooks.hook(self.session.epoch, outputs, start)


class Run:
    """The instrumented execution of one call."""

    def __init__(
        self,
        execution: Execution,
        record: OpRecord,
        operator: Operator,
        original: OriginalCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        by_native: bool,
    ) -> None:
        self.by_native, self.new = by_native, record.context is None
        self.execution, self.record, self.operator = execution, record, operator
        self.original = original
        self.call: Callable[..., Any] = original
        self.session = execution.session
        self.bound = bind(operator.func, args, kwargs)
        self.values = list(self.bound.values)
        self.mutated = self.bound.signature.mutated
        #: Whether these are still the values that the op was called with.
        self.intact = True
        self.start = 0
        self.made_count = 0  # The number of nodes, including the driver's.
        # Whether `values` are the inputs as edited.
        self.edited = False
        # Results of routines that were called already.
        self.done_before: tuple[Any, ...] = ()
        self.done_after: tuple[Any, ...] = ()
        # Whether the original was called already, and hooks for gradients of inputs were prepared.
        self.called = self.tapped = False
        # For each tensor that the op saved, whether it lies in what the op writes, if it is known.
        self.saved: list[bool] | None = None

    def result(self) -> Any:
        session, bound, operator, record = self.session, self.bound, self.operator, self.record
        if not (self.done_before or self.done_after or self.tapped):
            # It depends on facts of the last execution, and is compiled again after this one.
            record.program = None
        context = record.context = session.open(
            record.site,
            operator.raw,
            inputs=bound.values,
            attrs=bound.attrs,
            input_names=bound.signature.names,
            constant=self.execution.constant,
            recomputed=STATE.recomputing,
        )
        context.execution["passes_weights_on"] = self.passes_weights_on
        context.execution["writes"] = self.mutated
        context.execution["destinations"] = tensors_in([bound.out]) if bound.out is not None else []
        try:
            return self._run(context)
        finally:
            if is_grad_enabled():
                context.release()
            else:
                context.execution.clear()  # No backward routine asks for these values.

    def _run(self, context: OpContext) -> Any:
        session, record = self.session, self.record
        before = self._analyse(context, BEFORE_FORWARD)
        if before.steps:
            if not self.edited:
                self._edit_inputs(before)
            context.execution["inputs"] = self.values
        taps = Taps(self.execution.backward, context, self) if is_grad_enabled() else None
        # Before the inputs' nodes are read: reading the node of a view whose base was written
        # creates that node, which then counts as this op's.
        self.start = self.start or next_sequence()
        if taps is not None:
            values = taps.before(self.values, self.start)
            self.values, self.intact = values, self.intact and values is self.values
        returned = self._call(before, context)
        outputs = unchanged = self.outputs_of(returned)
        if taps is not None:
            outputs = taps.untap(outputs)
        context.execution["outputs"] = outputs
        after = self._analyse(context, AFTER_FORWARD)
        made = self.made_count = next_sequence() - self.start
        # After-forward analysis may have requested gradients, too. They count even if there are
        # none now, since the op may run with gradients later.
        arriving, leaving = context.plan(BEFORE_BACKWARD), context.plan(AFTER_BACKWARD)
        settled = not (before or after or arriving or leaving)
        caching = session.caching
        tracked = True
        results = outputs
        if taps is not None:
            results = taps.outputs(outputs)
            if session.wants_backward:
                tracked = self._track(context, outputs, settled)
            taps.after(outputs, self.start)
        if after.steps:
            results = self._edit_outputs(after, results)
        nodes = made if taps is not None else 0
        if settled and caching:
            # Backward ops that have not run yet still need hooks in each execution.
            record.idle_epoch, record.idle_nodes = session.epoch, nodes if tracked else -1
        elif caching and self.by_native and (tracked or are_native(record.hooks)):
            # Without gradients, nothing is known about the nodes.
            known = tracked and (taps is not None or not session.wants_backward)
            record.program = compiled(
                self,
                self.execution.watch,
                context,
                before,
                after,
                arriving,
                leaving,
                nodes if known else -1,
                taps,
                returned,
            )
        # An op that returns nothing (`x[i] = v`) has its written argument as output.
        if returned is None or results is unchanged:
            return returned
        return restructure(returned, results)

    def _track(self, context: OpContext, outputs: list[Any], opened: bool) -> bool:
        """Set hooks on the op's nodes; return True if they need none in this epoch."""
        execution, record, bound, start = self.execution, self.record, self.bound, self.start
        # Plans of nodes set their hooks after those for gradients of inputs, which must run later.
        ordered = not self.tapped or getattr(record.hooks, "pending", False)
        if ordered and execution._hook_as_before(record, outputs, start, bound):
            return False
        planned = ordered and execution._plan(record, context, bound, outputs, start)
        if planned and execution._hook_as_before(record, outputs, start, bound):
            return False
        if execution._track(record, context, bound, outputs, start, self.tapped):
            return True
        if not planned:
            record.hooks = later_hooks(
                execution.backward, execution.watch, record, context, bound, outputs, start, opened
            )
        return False

    def _analyse(self, context: OpContext, i_point: IPoint) -> Plan:
        session = self.session
        if not (session.wants(i_point) if self.new else session.due(context, i_point)):
            # After it, the number of outputs may have changed.
            before = i_point is BEFORE_FORWARD
            return context.plan(i_point) if before else context.trigger_callback(i_point)
        if not is_inference_mode_enabled():
            return call_routine(context.trigger_callback, i_point)
        # Tensors made by analysis are kept, and may be used with gradients later.
        with torch.inference_mode(False):
            return call_routine(context.trigger_callback, i_point)

    def passes_weights_on(self) -> bool:
        """Return True if other ops compute with the weights that this one reads."""
        return passes_weights_on(self.operator, *self.bound.given)

    def made(self, outputs: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors whose nodes this execution made."""
        return made(self.bound, outputs)

    def note_unseen(self, what: str, why: str) -> None:
        """Record what an observer did not see, and why."""
        self.execution.note_unseen(what, why)

    # Inputs.

    def _edit_inputs(self, plan: Plan) -> None:
        known = self.done_before
        for step in plan.steps:
            done, known = (known[:1], known[1:]) if known else ((), ())
            # The routine's own program may save for backward what the op is about to write.
            if step.action.autodiff and self.mutated and is_grad_enabled():
                with keep_saved(self._written_memory()):
                    changes = changes_of(step, self.values, done)
            else:
                changes = changes_of(step, self.values, done)
            self.execution.edits += len(changes)
            for position, new in changes:
                old, self.intact = self.values[position], False
                if position in self.mutated:
                    self._write(old, new, step)
                else:
                    self.values[position] = edited(old, new, step, node=self.operator.aliases)

    def _write(self, old: Any, new: Any, step: Step) -> None:
        """Edit an argument that the op writes, which must keep its storage."""
        if isinstance(old, (list, tuple)):
            for one, other in zip(old, new, strict=True):
                if other is not one:
                    self._write(one, other, step)
            return
        check_written(old, new, step)
        if step.action.autodiff and is_grad_enabled():
            old.copy_(new)
            return
        # The tensor version must not change: the edit invalidates no saved tensor that the op
        # itself would not invalidate.
        _overwrite(old, new)

    # The op.

    def _call(self, before: Plan, context: OpContext) -> Any:
        if before.replacement is not None:
            self.original.keep(returned := self._replace(before.replacement))
            return returned
        replaced = context.plan(BEFORE_BACKWARD).replacement if is_grad_enabled() else None
        if replaced is not None:
            returned = run_with_replaced_backward(self, self.execution.backward, replaced)
            self.original.keep(returned)
            return returned
        if self._edits_in_place(context):
            with keep_saved(self._written_memory()) as self.saved:
                return self.call_original(self.values)
        if self.intact:
            args, kwargs = self.bound.given
            return self.call(*args, **kwargs)
        return self.call_original(self.values)

    def _replace(self, step: Step) -> Any:
        """Return a replacement's result, in the form and place of the op's own."""
        self.execution.edits += 1
        values, signature = list(self.values), self.bound.signature
        written = values[0] if signature.in_place and values else None
        if isinstance(written, torch.Tensor):
            # The routine's argument must stay intact when the result is written over the original.
            values[0] = given = written.clone()
            version = None if given.is_inference() else version_of(given)
            with resumed_modes(), standing_for(self._replaced()):
                result = step.replace(values)
            # The routine may have written its argument in place.
            if result is not given or version is None or version_of(given) != version:
                check_written(written, result, step, same_dtype=False)
                written.copy_(result)
            # `x[i] = v` returns nothing; every other in-place op returns its input.
            return None if self.operator.op_type == "__setitem__" else written
        given_out = self.bound.out is not None
        empty = self.operator.counts == {0} or (given_out and self.operator.empty_with_out)
        with resumed_modes(), standing_for(self._replaced()):
            result = step.replace(values, empty=empty)
        self._check_result(result, step)
        if result is None:  # It has written its arguments itself.
            return None
        if self.bound.out is not None:
            written = self._write_out(result, step)
            return None if self.operator.empty_with_out else written
        kind = getattr(torch.return_types, self.operator.op_type, None)
        if kind is not None and type(result) in (tuple, list) and len(result) == kind.n_fields:
            return kind(result)
        return result

    def _check_result(self, result: Any, step: Step) -> None:
        results = outputs_of(result)
        counts = self.operator.counts
        if counts and len(results) not in counts:
            raise RoutineResultError(
                f"A replacement returned {len(results)} values, but {self.operator.op_type} has "
                f"{' or '.join(map(str, sorted(counts)))}",
                where=step.where,
                fix="Return what the op would have returned",
            )
        if counts and not all(isinstance(value, torch.Tensor) for value in results):
            raise EditError(
                f"{result!r} cannot replace the result of {self.operator.op_type}",
                where=step.where,
                fix="Return tensors",
            )

    def _write_out(self, result: Any, step: Step) -> Any:
        destinations = outputs_of(self.bound.out)
        results = outputs_of(result)
        if len(destinations) != len(results):
            raise EditError(
                f"A replacement returned {len(results)} values for {len(destinations)} "
                "destinations (out=)",
                where=step.where,
                fix="Return one value for each destination",
            )
        with torch.no_grad():
            for destination, value in zip(destinations, results, strict=True):
                check_written(destination, value, step, same_dtype=False)
                destination.copy_(value)
        return self.bound.out

    def call_original(self, values: Sequence[Any]) -> Any:
        """Run the original on values by position."""
        args, kwargs = self.bound.call_args(values)
        return self.call(*args, **kwargs)

    def _replaced(self) -> Callable[[Sequence[Any]], Any]:
        """Return the original as a function of its inputs, for a replacement, which may keep it and
        must not keep this execution's inputs by it.
        """
        arguments, call = self.bound.arguments(), self.call

        def original(values: Sequence[Any]) -> Any:
            args, kwargs = arguments(values)
            return call(*args, **kwargs)

        return original

    def _edits_in_place(self, context: OpContext) -> bool:
        """Return True if edits may change storage that the op saves for backward."""
        if not (self.bound.signature.in_place and is_grad_enabled()):
            return False
        asked = context.plan(AFTER_FORWARD).edits
        return asked or self.session.due(context, AFTER_FORWARD)

    def _written_memory(self) -> set[int]:
        memory = {memory_of(t) for t in tensors_in(self.values[p] for p in self.mutated)}
        return {number for number in memory if number is not None}

    def outputs_of(self, returned: Any) -> list[Any]:
        if returned is None and self.bound.signature.in_place:
            return [self.values[0]]
        return outputs_of(returned)

    # Outputs.

    def _edit_outputs(self, plan: Plan, outputs: list[Any]) -> list[Any]:
        outputs, known = list(outputs), self.done_after
        for step in plan.steps:
            done, known = known[:1], known[1:]
            changes = changes_of(step, outputs, done)
            self.execution.edits += len(changes)
            for position, new in changes:
                old = outputs[position]
                if isinstance(old, torch.Tensor) and self._written(old):
                    self._rewrite(old, new, step)
                elif self._is_new_leaf(old) and not step.action.autodiff:
                    # The program will read the gradient from this very leaf.
                    check_written(old, new, step)
                    _overwrite(old, new)
                else:
                    outputs[position] = edited(old, new, step, node=self.operator.aliases)
        return outputs

    def _is_new_leaf(self, output: Any) -> bool:
        """Return True if the op made a leaf, as ``torch.randn(3, requires_grad=True)`` does."""
        return (
            isinstance(output, torch.Tensor)
            and not any(output is value for value in tensors_in(self.bound.values))
            and is_weight(output)
        )

    def _written(self, output: torch.Tensor) -> bool:
        destinations = tensors_in([self.bound.out])
        if self.bound.signature.in_place:
            destinations += tensors_in([self.values[0]])
        return any(output is destination for destination in destinations)

    def _rewrite(self, old: torch.Tensor, new: Any, step: Step) -> None:
        """Write an edited result to the tensor that the op wrote."""
        if self.operator.op_type in IN_PLACE_METADATA:
            raise UnsupportedError(
                f"The result of {self.operator.op_type} cannot be edited: the op changes the shape "
                "of its own input",
                where=step.where,
                fix="Edit the input of the op that uses it",
            )
        check_written(old, new, step)
        if self.called and is_grad_enabled():
            copy_saved(new_nodes(self.made([old]), self.start)[0], self._written_memory())
        if step.action.autodiff and is_grad_enabled():
            old.copy_(new)
        elif is_grad_enabled() and requires_grad(old) and memory_of(old) is None:
            raise UnsupportedError(
                f"The result of {self.operator.op_type} cannot be edited: the operator may have "
                "saved the memory that it writes for its backward, and whether it did is not known "
                "for tensors of this layout or type",
                where=step.where,
                fix="Edit the input of the op that uses it",
            )
        else:
            # The graph stays valid: the op's saved tensors are no longer in this storage, and
            # others' saved tensors in it are outdated since the op wrote it.
            _overwrite(old, new)


def _is_whole(bound: BoundCall) -> bool:
    """Return True if a call writes its first argument, which is no view."""
    written = bound.values[0] if bound.signature.in_place else None
    return type(written) is torch.Tensor and base_of(written) is None


def _overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a tensor without autograd noticing."""
    if memory_of(tensor) is not None:
        tensor.data.copy_(values)
        return
    # The `data` of a sparse tensor does not share the memory that must be written.
    with torch.no_grad():
        tensor.copy_(values)
