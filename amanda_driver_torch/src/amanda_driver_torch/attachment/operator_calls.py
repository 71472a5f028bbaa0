"""Calls of operators: where they enter from the interceptors, and to which record they belong.

`execution` decides what happens at an operator. Collectives, which torch calls for modules at
times of its own, are found here as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from amanda_core.driver_kit import OUTSIDE, Operands, Origin, Parameters, Scope, Tool
from amanda_driver_torch.attachment.module_calls import ModuleCalls
from amanda_driver_torch.execution.collectives import Collective, CollectiveCall
from amanda_driver_torch.execution.execute import Execution, Run
from amanda_driver_torch.execution.reductions import Bucket, Reductions, expected
from amanda_driver_torch.execution.transformed import TransformedRun
from amanda_driver_torch.gradients.nodes import tensors_in
from amanda_driver_torch.gradients.records import OpRecord
from amanda_driver_torch.identity.frames import unit_around
from amanda_driver_torch.interception.buckets import BUCKETS
from amanda_driver_torch.interception.patches import PATCHES
from amanda_driver_torch.interception.tracing import reason_to_ignore
from amanda_driver_torch.operators.operator import Args, Kwargs, Operator, Original
from amanda_driver_torch.threads.modes import call_without_modes, in_users_modes
from amanda_driver_torch.threads.state import STATE, call_opaquely
from amanda_driver_torch.torch_internals.internals import (
    TENSOR_METHODS,
    functorch_active,
    is_machinery,
    unwrapped,
)
from amanda_driver_torch.torch_internals.modules import inner_of

__all__ = ["OperatorCalls"]

# torch's C bindings of these turn any TypeError into NotImplemented, even a routine's own.
_BINARY = frozenset(
    {"add", "sub", "rsub", "mul", "div", "matmul", "pow", "remainder", "floor_divide", "fmod"}
    | {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"}
    | {"eq", "ne", "lt", "le", "gt", "ge"}
)


class OperatorCalls(ModuleCalls):
    """The calls of operators under one session.

    Attributes:
        reductions: Gradients that wrappers for several processes reduce.
    """

    reductions: Reductions
    _execution: Execution
    _parameters: Parameters
    #: The record that was made last, until its first execution.
    _new: object = None

    def execute(
        self, operator: Operator, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Execute one call of an operator."""
        if self._is_ignored(operator.op_type, args, kwargs):
            return call(*args, **kwargs)
        try:
            record = self._interceptor.locate(operator.op_type, args, kwargs)
        except Exception as error:
            self.report_failure(error, operator.op_type)
            record = None
        if record is not None and is_machinery(record.caller):
            self._note_machinery(operator.op_type, args, kwargs)
            record = None
        if record is None:
            return call(*args, **kwargs)
        if functorch_active():
            return TransformedRun(self._execution, record, operator, call, args, kwargs).execute()
        return self._execution(record, operator, call, args, kwargs)

    def execute_known(
        self, record: OpRecord, operator: Operator, call: Original, args: Args, kwargs: Kwargs
    ) -> Any:
        """Execute one call of an operator whose record the native interceptor has found."""
        # What was resolved for this call was not to be ignored.
        new, self._new = record is self._new, None
        if not new and self._is_ignored(operator.op_type, args, kwargs):
            return call(*args, **kwargs)
        kind = TransformedRun if functorch_active() else Run
        run = kind(self._execution, record, operator, call, args, kwargs)
        run.by_native = True
        return run.execute()

    def resolve(
        self,
        op_type: str,
        scope: Scope | None,
        frames: Any,
        zone: str,
        caller: Any,
        checked: bool,
        args: Args,
        kwargs: Kwargs,
        occurrence: int,
        weights: Operands | None,
    ) -> Any:
        """Return the record of an op that the native interceptor does not know; None to ignore the
        op.

        It is in a tuple if the same numbers are another op next time: the frames around tell.
        """
        if not checked and self._is_ignored(op_type, args, kwargs):
            return None
        try:
            origin = Origin(op_type, scope or OUTSIDE, frames, zone)
            origin.caller = caller
            values = (*args, *kwargs.values()) if kwargs else args
            found = self._sites.resolve(origin, values, occurrence, weights)
            if type(found) is not OpRecord:
                return found
            self._new = found if found.context is None else None
            if is_machinery(found.caller):
                self._note_machinery(op_type, args, kwargs)
                return None
            passing, self._not_called = self._not_called, False
            return (found,) if passing else found
        except Exception as error:
            self.report_failure(error, op_type)
            return None

    def _is_ignored(self, op_type: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        try:
            reason = reason_to_ignore(args, kwargs)
        except Exception as error:
            self.report_failure(error, op_type)
            return True
        if not reason:
            return reason is not None
        tools = [tool for tool in self.session.tools if not tool.sees_transforms]
        if tools:
            self.session.warn_once(reason)
            self._note_unseen(op_type, args, kwargs, tools)
        return len(tools) == len(self.session.tools)

    def _note_machinery(self, op_type: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note an operator that torch's own code calls for purposes of its own."""
        if functorch_active():
            # It may be the function that is transformed.
            tools = [tool for tool in self.session.tools if tool.sees_transforms]
            self._note_unseen(op_type, args, kwargs, tools)

    def _note_unseen(
        self, op_type: str, args: Sequence[Any], kwargs: dict[str, Any], tools: Sequence[Tool]
    ) -> None:
        """Note an operator inside a transform for tools that do not see it."""
        values = (*args, *kwargs.values())
        self.attempt(op_type, None, self._note_call, op_type, values, tools)

    def _note_call(self, op_type: str, values: Sequence[Any], tools: Sequence[Tool]) -> None:
        """Note such an operator, with the parameters that it reads."""
        scope = STATE.activations[-1].scope if STATE.activations else OUTSIDE
        weights = {}
        for value in map(unwrapped, values):
            if isinstance(value, torch.Tensor):
                found = self._parameters.find(value, scope.root, operand=False)
                if found is not None:
                    weights[f"{found.root}:{found.name}"] = found.shape
        op = f"{scope.path}/{op_type}" if scope.path else op_type
        self.session.note_call(op, "inside torch.func transforms", weights, tools)

    def _hides(self, operator: Operator, record: OpRecord) -> bool:
        """Return True if torch turns a TypeError in this call into NotImplemented."""
        if self._interceptor.hides_type_errors and operator.op_type.removesuffix("_") in _BINARY:
            return True
        # torch's reflected operators are Python functions whose decorator does so.
        return record.caller == TENSOR_METHODS

    def execute_python(
        self, raw: Any, name: str, call: Original, args: Args, kwargs: Kwargs
    ) -> Any:
        """Execute one call of an operator written in Python or as a script."""
        operator = self.attempt(name, None, Operator, raw, raw, name)
        if operator is None:
            return call(*args, **kwargs)
        # A module called in its body ends this: the operator is then treated as a container.
        run = self.execute, operator, in_users_modes(call), args, kwargs
        return call_opaquely(call_without_modes, *run)

    def execute_collective(
        self, collective: Collective, call: Original, group: Any, args: Args, kwargs: Kwargs
    ) -> Any:
        """Execute one call of a method of a process group that communicates."""
        session, op_type, tensors = self.session, collective.op_type, tuple(tensors_in(args))
        if not collective.is_bound(args):
            session.note_call(op_type, "since tensors were passed by keyword")
            return call(group, *args, **kwargs)
        if self._is_ignored(op_type, tensors, {}):
            return call(group, *args, **kwargs)
        locate = self._locate_in_module if collective.is_internal else self._locate_collective
        record = self.attempt(op_type, None, locate, op_type, tensors)
        if record is None or (record.idle_epoch == session.epoch and session.caching):
            return call(group, *args, **kwargs)
        return CollectiveCall(session, record, collective, group, args, kwargs).execute(call)

    def expect_reduction(self, reducer: Any) -> None:
        """Note that a `DistributedDataParallel` module will reduce its gradients."""
        if (module := expected(reducer)) is not None:
            self.attempt("reductions", None, BUCKETS.begin, module, self, PATCHES.afterwards)

    def execute_bucket(
        self, collective: Collective, call: Original, group: Any, args: Args, bucket: Bucket
    ) -> Any:
        """Execute one reduction of gradients in the backward pass of a module."""
        session, op_type = self.session, collective.op_type
        record = self.attempt(op_type, None, self.reductions.record, op_type, bucket)
        if record is None or (record.idle_epoch == session.epoch and session.caching):
            return call(group, *args)
        keys = {"bucket": bucket.number}
        run = session, record, collective, group, args, dict[str, Any](), keys, bucket.hook
        return CollectiveCall(*run).execute(call)

    def _locate_in_module(self, op_type: str, tensors: tuple[Any, ...]) -> OpRecord | None:
        """Return the record of a collective that torch calls for a module, from one line."""
        scope = STATE.activations[-1].scope if STATE.activations else OUTSIDE
        if not scope.root:
            return self._locate_collective(op_type, tensors)
        found = self._sites.resolve(Origin(op_type, scope, ()), (), 0, [(0, -1, "buffers")])
        return found if isinstance(found, OpRecord) else None

    def _locate_collective(self, op_type: str, tensors: tuple[Any, ...]) -> OpRecord | None:
        """Return the record of a collective.

        What FSDP communicates belongs to the module whose parameters these are. FSDP calls its
        functions from one line, at times that differ from step to step, and with parts of
        parameters that differ between processes.
        """
        unit, end = unit_around(sys._getframe(1))
        around = STATE.activations[-1].scope if STATE.activations else OUTSIDE
        scope = None if unit is None else self.scopes.known(inner_of(unit.module), around)
        if unit is None or scope is None:
            return self._interceptor.locate(op_type, tensors, {})
        if around.zone:
            scope = self.scopes.zoned(scope, around.zone)
        place = f"{'backward' if unit.is_backward else 'forward'} {unit.number}"
        frames = self._sites.walk(sys._getframe(1), 1, end=end)
        operands = [(0, -1 - 2 * unit.number - unit.is_backward, place)]
        found = self._sites.resolve(Origin(op_type, scope, frames), (), 0, operands)
        return found if isinstance(found, OpRecord) else None
