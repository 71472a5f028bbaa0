"""One execution of one operator: analysis, edits before, the op or its replacement, edits after.

Owns the order of these, and the straight-through meaning of edits. The sites identify the call;
`gradients` handles gradients; `written_values` what the op writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amanda_core.driver_kit import EMPTY, OpContext, Plan, Session, Step
from amanda_core.interface import IPoint, is_annotated
from amanda_driver_torch.communication import complete, is_unfinished
from amanda_driver_torch.execution.native_plans import compiled
from amanda_driver_torch.execution.node_plans import are_native
from amanda_driver_torch.execution.pending_hooks import hook_as_before, hook_nodes
from amanda_driver_torch.execution.replacement import replaced
from amanda_driver_torch.execution.viewing import passes_weights_on
from amanda_driver_torch.execution.written_values import edit_result, write_argument, written_memory
from amanda_driver_torch.gradients.backward import Backward
from amanda_driver_torch.gradients.driver_nodes import call_keeping_saved
from amanda_driver_torch.gradients.edits import edited
from amanda_driver_torch.gradients.nodes import tensors_in
from amanda_driver_torch.gradients.operator_call import OperatorCall
from amanda_driver_torch.gradients.output_taps import tap_outputs
from amanda_driver_torch.gradients.records import OpRecord
from amanda_driver_torch.gradients.replaced_backward import run_with_replaced_backward
from amanda_driver_torch.gradients.taps import Taps
from amanda_driver_torch.operators.operator import Args, Kwargs, Operator, Original
from amanda_driver_torch.operators.signature import outputs_of, restructure
from amanda_driver_torch.threads.modes import call_routine, changes_of
from amanda_driver_torch.threads.recordings import ACTIVE, current
from amanda_driver_torch.threads.state import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    BEFORE_BACKWARD,
    BEFORE_FORWARD,
    STATE,
)
from amanda_driver_torch.torch_internals.internals import (
    is_grad_enabled,
    is_inference_mode_enabled,
    next_sequence,
)

__all__ = ["Execution", "Run"]


class Execution:
    """Executes operators for one attachment.

    Args:
        session: The session.
        backward: The backward program.
        constant: Returns a value that is the same in every execution of its op, else None.
        hides: Returns True if torch turns a TypeError in an op's call into NotImplemented.

    Attributes:
        edits: Number of values edited and operators replaced so far.
    """

    def __init__(
        self,
        session: Session,
        backward: Backward,
        constant: Callable[[Any], Any],
        hides: Callable[[Operator, OpRecord], bool],
    ) -> None:
        self.session, self.backward = session, backward
        self.constant, self.hides = constant, hides
        self.edits = 0

    def __call__(
        self, record: OpRecord, operator: Operator, call: Original, args: Args, kwargs: Kwargs
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
        if not (record.idle_epoch == session.epoch and session.caching):
            return Run(self, record, operator, call, args, kwargs).execute()
        if not session.wants_backward or not is_grad_enabled():
            return call(*args, **kwargs)
        start = next_sequence()
        result = call(*args, **kwargs)
        if next_sequence() - start == record.idle_nodes:
            return result
        return self.settle(record, operator, args, kwargs, result, start)

    def resume(
        self,
        record: OpRecord,
        operator: Operator,
        call: Original,
        args: Args,
        kwargs: Kwargs,
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
        run = Run(self, record, operator, call, args, kwargs)
        run.edited, run.done_before, run.done_after = edited, before, after
        if returned is not None:
            run.original.keep(returned)
            run.call, run.start = (lambda *_, **__: returned), start
            run.called, run.tapped = True, tapped
        return run.execute()

    def settle(
        self,
        record: OpRecord,
        operator: Operator,
        args: Args,
        kwargs: Kwargs,
        result: Any,
        start: int,
    ) -> Any:
        """Analyse the nodes of an idle op that made other nodes than when it was found idle."""
        try:
            outputs, backward = outputs_of(result), self.backward
            if hook_as_before(backward, record, outputs, start):
                return result
            made_nodes = next_sequence() - start
            if made_nodes != record.idle_nodes and record.context is not None:
                call = Run(self, record, operator, operator.func, args, kwargs)
                call.start = start
                call.bind()
                if result is None and call.writes_whole:
                    outputs = call.values[:1]
                if hook_as_before(backward, record, outputs, start, call):
                    return result
                # The remembered constants are those of another execution.
                record.context.remember_constants()
                if hook_nodes(backward, call, outputs, is_unlike=True):
                    record.idle_nodes = made_nodes
        except Exception as error:
            self.session.failures.report(error, record.site.namespace, record.site.name)
        return result

    def edit(self, step: Step, values: list[Any], result: Any, aliases: bool) -> None:
        """Apply a routine's result to `values`; called by the native interceptor."""
        changes = step.changes(values, result)
        self.edits += len(changes)
        for position, new in changes:
            values[position] = edited(values[position], new, step, node=aliases)


class Run(OperatorCall):
    """The instrumented execution of one call.

    Attributes:
        by_native: Whether the native interceptor calls it, which executes compiled plans.
        edited: The values that the op was called with, if routines edited some already.
        done_before: Results of the first routines before the op, which were called already.
        done_after: Those after it.
        intact: Whether the values are still those that the program gave.
    """

    execution: Execution
    by_native = False
    edited: list[Any] | None = None
    done_before: tuple[Any, ...] = ()
    done_after: tuple[Any, ...] = ()
    intact = True

    def execute(self) -> Any:
        """Execute the call, and return its result; if the driver itself fails, fall back to the
        original where that is allowed.
        """
        record = self.record
        if ACTIVE and record.context is None and (recording := current()) is not None:
            recording.note("operators that have not run before are not in the tools' plans")
            return self.call(*self.args, **self.kwargs)
        try:
            self.bind()
            self.new = record.context is None
            if self.edited is not None:
                # The op may have handed one of them back.
                self.values, self.intact = self.edited, False
            if not (self.done_before or self.done_after or self.tapped):
                # It depends on facts of the last execution, and is compiled again after this one.
                record.program = None
            context = self._open()
            try:
                return self._run(context)
            finally:
                if is_grad_enabled():
                    context.release()
                else:
                    context.execution.clear()  # No backward routine asks for these values.
        except Exception as error:
            failures, site, original = self.session.failures, record.site, self.original
            if not failures.is_drivers(error, original):
                if (
                    isinstance(error, TypeError)
                    and is_annotated(error)
                    and self.execution.hides(self.operator, record)
                ):
                    self.session.defer(error)
                raise
            return failures.recover(
                error, site.namespace, site.name, original, self.args, self.kwargs
            )
        finally:
            self.original.forget()

    def _open(self) -> OpContext:
        bound = self.bound
        self.record.kept = False
        context = self.context = self.record.context = self.session.open(
            self.record.site,
            self.operator.raw,
            inputs=bound.values,
            attrs=bound.attrs,
            input_names=bound.signature.names,
            constant=self.execution.constant,
            recomputed=STATE.recomputing,
        )
        context.execution["passes_weights_on"] = self.passes_weights_on
        context.execution["writes"] = self.mutated
        context.execution["destinations"] = tensors_in([bound.out]) if bound.out is not None else []
        return context

    def _run(self, context: OpContext) -> Any:
        before = self.before = self._analyse(BEFORE_FORWARD)
        if before.steps:
            if is_unfinished(self.operator.op_type, before.steps):
                call_routine(complete, self.values)
            if self.edited is None:
                self._edit_inputs(before)
            context.execution["inputs"] = self.values
        taps, has_gradients = None, is_grad_enabled()
        if has_gradients and (self.session.wants(AFTER_FORWARD) or self._has_gradient_plans()):
            taps = Taps(self.execution.backward, self)
        # Before the inputs' nodes are read: reading the node of a view whose base was written
        # creates that node, which then counts as this op's.
        self.start = self.start or next_sequence()
        if taps is not None:
            values = taps.before(self.values, self.start)
            self.values, self.intact = values, self.intact and values is self.values
        returned = self.returned = self._call(before)
        results = outputs = unchanged = self.outputs_of(returned)
        if taps is not None:
            results = outputs = taps.untap(outputs)
        context.execution["outputs"] = outputs
        after = self.after = self._analyse(AFTER_FORWARD)
        self.made_count = next_sequence() - self.start
        # After-forward analysis may have requested gradients, too. They count even if there are
        # none now, since the op may run with gradients later.
        plans = context.plans()
        self.arriving = plans.get(BEFORE_BACKWARD, EMPTY)
        self.leaving = plans.get(AFTER_BACKWARD, EMPTY)
        settled = not plans and before is EMPTY
        tracked = True
        if has_gradients:
            if self.arriving.steps:
                results = tap_outputs(self.execution.backward, self, outputs)
            if self.session.wants_backward:
                tracked = hook_nodes(self.execution.backward, self, outputs, settled)
            if taps is not None:
                taps.after(outputs, self.start)
        if after.steps:
            if is_unfinished(self.operator.op_type, after.steps):
                call_routine(complete, results)
            results = self._edit_outputs(after, results)
        if self.session.caching:
            self._remember(taps, settled, tracked, has_gradients)
        # An op that returns nothing (`x[i] = v`) has its written argument as output.
        if returned is None or results is unchanged:
            return returned
        return restructure(returned, results)

    def _remember(
        self, taps: Taps | None, settled: bool, tracked: bool, has_gradients: bool
    ) -> None:
        """Note in the record how much of the work further executions can skip."""
        record, nodes = self.record, self.made_count if has_gradients else 0
        # Nothing would tell whether a later call of an idle op is inside a transform.
        if settled and not (self.session.sees_transforms and self.by_native):
            # Backward ops that have not run yet still need hooks in each execution.
            record.idle_epoch, record.idle_nodes = self.session.epoch, nodes if tracked else -1
        elif self.by_native and (tracked or are_native(record.hooks)):
            # Without gradients, nothing is known about the nodes.
            known = tracked and (has_gradients or not self.session.wants_backward)
            record.program = compiled(self, taps, nodes if known else -1)

    def _analyse(self, i_point: IPoint) -> Plan:
        session, context = self.session, self.context
        if not (session.wants(i_point) if self.new else session.due(context, i_point)):
            # After it, the number of outputs may have changed.
            before = i_point is BEFORE_FORWARD
            return context.plan(i_point) if before else context.trigger_callback(i_point)
        if ACTIVE and current() is not None:
            return context.plan(i_point)  # As in `analysed`, with a call less.
        if not is_inference_mode_enabled():
            return call_routine(context.trigger_callback, i_point)
        # Tensors made by analysis are kept, and may be used with gradients later.
        with torch.inference_mode(False):
            return call_routine(context.trigger_callback, i_point)

    def passes_weights_on(self) -> bool:
        """Return True if other ops compute with the weights that this one reads."""
        return passes_weights_on(self.operator, *self.bound.given)

    def _has_gradient_plans(self) -> bool:
        plans = self.context.plans()
        return BEFORE_BACKWARD in plans or AFTER_BACKWARD in plans

    def _edit_inputs(self, plan: Plan) -> None:
        known = self.done_before
        for step in plan.steps:
            done, known = (known[:1], known[1:]) if known else ((), ())
            # The routine's own program may save for backward what the op is about to write.
            if step.action.autodiff and self.mutated and is_grad_enabled():
                memory = written_memory(self)
                changes, _ = call_keeping_saved(memory, changes_of, step, self.values, done)
            else:
                changes = changes_of(step, self.values, done)
            self.execution.edits += len(changes)
            for position, new in changes:
                old, self.intact = self.values[position], False
                if position in self.mutated:
                    write_argument(old, new, step)
                else:
                    self.values[position] = edited(old, new, step, node=self.operator.aliases)

    def _call(self, before: Plan) -> Any:
        """Run the op or its replacement; return what the program gets if nothing is edited."""
        replacement = before.replacement
        backward = self.context.plan(BEFORE_BACKWARD).replacement if is_grad_enabled() else None
        if ACTIVE and (recording := current()) is not None:
            for one in (replacement, backward):
                if one is not None:
                    recording.leave_out(one)
            replacement = backward = None
        if replacement is not None:
            self.execution.edits += 1
            returned = replaced(self, replacement)
        elif backward is not None:
            returned = run_with_replaced_backward(self, self.execution.backward, backward)
        elif self._edits_in_place():
            memory = written_memory(self)
            returned, self.saved = call_keeping_saved(memory, self.call_original, self.values)
            return returned
        elif self.intact:
            args, kwargs = self.bound.given
            return self.call(*args, **kwargs)
        else:
            return self.call_original(self.values)
        self.original.keep(returned)
        return returned

    def _edits_in_place(self) -> bool:
        """Return True if edits may change storage that the op saves for backward."""
        if not (self.bound.signature.in_place and is_grad_enabled()):
            return False
        asked = self.context.plan(AFTER_FORWARD).edits
        return asked or self.session.due(self.context, AFTER_FORWARD)

    def _edit_outputs(self, plan: Plan, outputs: list[Any]) -> list[Any]:
        outputs, known = list(outputs), self.done_after
        for step in plan.steps:
            done, known = known[:1], known[1:]
            changes = changes_of(step, outputs, done)
            self.execution.edits += len(changes)
            for position, new in changes:
                old = outputs[position]
                if not (isinstance(old, torch.Tensor) and edit_result(self, old, new, step)):
                    outputs[position] = edited(old, new, step, node=self.operator.aliases)
        return outputs
