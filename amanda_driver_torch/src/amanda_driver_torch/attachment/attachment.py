"""`TorchAttachment`: attaches one session to PyTorch.

Owns the start and end of the driver's parts (sites, execution, backward program, interceptor,
patches), and where operators enter. `execution` decides what happens at an operator. A
little over 400 lines: one class.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from amanda_core.driver_kit import (
    NATIVE,
    OUTSIDE,
    Operands,
    Origin,
    Scope,
    Scopes,
    Session,
    Sites,
    forget_all_edited,
)
from amanda_core.interface import CoverageGap, Site
from amanda_driver_torch.attachment.module_calls import NAMESPACE, ModuleCalls
from amanda_driver_torch.compiled.choice import why_eager
from amanda_driver_torch.execution.collectives import Collective, CollectiveCall
from amanda_driver_torch.execution.execute import Execution, Run
from amanda_driver_torch.execution.reductions import Bucket, Reductions, clear_hooks, expected
from amanda_driver_torch.facts import FACTS
from amanda_driver_torch.gradients.backward import Backward
from amanda_driver_torch.gradients.nodes import tensors_in
from amanda_driver_torch.gradients.records import OpRecord
from amanda_driver_torch.identity.frames import unit_around
from amanda_driver_torch.identity.leaves import Leaves
from amanda_driver_torch.identity.rules import (
    RULES,
    new_labels,
    new_parameters,
    new_scopes,
)
from amanda_driver_torch.interception import device_graphs
from amanda_driver_torch.interception.buckets import BUCKETS
from amanda_driver_torch.interception.forward_calls import ForwardCalls
from amanda_driver_torch.interception.function_mode import FunctionModeInterceptor
from amanda_driver_torch.interception.fused_inference import COMPILED
from amanda_driver_torch.interception.interceptor import Interceptor
from amanda_driver_torch.interception.interceptor_choice import INTERCEPTORS
from amanda_driver_torch.interception.joining import ThreadState
from amanda_driver_torch.interception.patches import PATCHES
from amanda_driver_torch.interception.tracing import reason_to_ignore
from amanda_driver_torch.operators.bindings import unknown_bindings
from amanda_driver_torch.operators.operator import Operator
from amanda_driver_torch.threads.modes import call_without_modes, in_users_modes
from amanda_driver_torch.threads.state import STATE, call_opaquely
from amanda_driver_torch.torch_internals.internals import (
    RELEASE,
    TENSOR_METHODS,
    is_machinery,
    runs_backward,
    unwrapped,
)
from amanda_driver_torch.torch_internals.modules import has_buffer, inner_of
from amanda_driver_torch.torch_internals.tensor_attributes import is_weight

if TYPE_CHECKING:
    from amanda_driver_torch.compiled.callbacks import CompiledCode

__all__ = ["TorchAttachment"]

# torch's C bindings of these turn any TypeError into NotImplemented, even a routine's own.
_BINARY = frozenset(
    {"add", "sub", "rsub", "mul", "div", "matmul", "pow", "remainder", "floor_divide", "fmod"}
    | {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"}
    | {"eq", "ne", "lt", "le", "gt", "ge"}
)


R = TypeVar("R")
#: Name of what is kept of a session for the next one of the same tools.
_KEPT = "pytorch.attachment"


class TorchAttachment(ModuleCalls):
    """Instruments the operators of one thread, and their backward ops in any thread.

    Attributes:
        session: The session.
        scopes: The modules that have been called.
        backward: The backward program.
        reductions: Gradients that wrappers for several processes reduce.
        watch: The native extension's part of the interceptor, or None.
    """

    facts = FACTS

    def __init__(self, session: Session) -> None:
        self._connect(session)
        self.backward = Backward(session, Leaves(self.scopes, self._labels), NAMESPACE)
        self._execution = self._new_execution()
        self.reductions = Reductions(session, self.scopes, self.backward, NAMESPACE)
        self._sites = self._new_sites(STATE, NAMESPACE, OpRecord, self._drop)
        self._interceptor = self._choose()
        self.watch = self.backward.watch = self._interceptor.watch

    @classmethod
    def of(cls, session: Session) -> TorchAttachment:
        """Return the attachment of the last session of the same tools, or a new one."""
        kept = session.persistent(_KEPT, list[TorchAttachment])
        if not kept:
            return cls(session)
        attachment = kept.pop()
        if INTERCEPTORS.choice().name != attachment._interceptor.name:
            return cls(session)
        attachment._resume(session)
        return attachment

    def _resume(self, session: Session) -> None:
        """Serve another session of the same tools with what is known of operators."""
        self._connect(session)
        self.backward.resume(session)
        self._execution = self._new_execution()
        self.reductions = Reductions(session, self.scopes, self.backward, NAMESPACE)
        interceptor: Any = self._interceptor
        interceptor.resume(self._execution)
        self.watch = self.backward.watch = interceptor.watch
        self.watch.second_order = False

    def _connect(self, session: Session) -> None:
        self.session = session
        self.scopes = session.shared("pytorch.scopes", new_scopes)
        self._labels = session.shared("pytorch.labels", new_labels)
        self._parameters = session.shared(
            "pytorch.parameters", lambda: new_parameters(self.scopes, self._labels)
        )
        self._parameters.sessions += session.host is None
        self.forward_calls = ForwardCalls(session, PATCHES.add)
        #: Checkpointed functions that run for the first time now, from the outermost one.
        self.first_runs: list[Any] = []
        self._compiled: CompiledCode | None = None
        #: The record that was made last, until its first execution.
        self._new: object = None
        self._attached = False

    def _new_execution(self) -> Execution:
        constant = _constant_in(self.scopes)
        return Execution(self.session, self.backward, constant, self._hides)

    def _new_sites(
        self, state: Any, namespace: str, new: Callable[[Site, str], R], drop: Callable[[R], None]
    ) -> Sites[R]:
        names: dict[Any, Any] = self.session.shared("pytorch.names", dict)
        scopes, labels, parameters = self.scopes, self._labels, self._parameters
        inside = self.run_inside if state is not None else lambda scope: None
        return Sites(RULES, state, scopes, labels, names, namespace, new, drop, parameters, inside)

    def _choose(self) -> Interceptor:
        """Return the requested interceptor, or the best available one."""
        if INTERCEPTORS.choice().name == NATIVE:
            from amanda_driver_torch.interception.native_interceptor import NativeInterceptor

            return NativeInterceptor(self, self._execution, self._sites)
        return FunctionModeInterceptor(self, self._sites)

    def attach(self) -> None:
        """Start intercepting in this thread."""
        why_eager(self._interceptor.name)  # A setting that does not exist is refused.
        self._begin()
        self.session.at_close(self.detach)
        PATCHES.acquire(self)
        STATE.attachment = self
        STATE.not_compiled = {}
        COMPILED.is_split = any(tool.needs_whole for tool in self.session.tools)
        self._interceptor.start()
        self.attempt("calls of forward", None, self.forward_calls.foresee_program)

    def _begin(self) -> None:
        self._before = STATE.quiet, STATE.opaque, STATE.backward
        self._attached, self._thread = True, ThreadState()

    def enter_thread(self) -> None:
        """Intercept in this thread, after another one, which has ended."""
        self._begin()
        STATE.attachment = self
        self._interceptor.enter_thread()

    def detach(self) -> None:
        """Stop intercepting and restore everything."""
        if not self._attached:
            return
        elsewhere = not self._thread.is_here()
        # What calls that go on know of operators does not change under them.
        keeps = not elsewhere and self._interceptor.name == NATIVE and not STATE.activations
        if not elsewhere:
            # Also if an exception kept a call from restoring them.
            STATE.quiet, STATE.opaque, STATE.backward = self._before
        is_left = self._thread.leave(self)
        try:
            if not elsewhere:
                self.watch = self.backward.watch = None
            self._interceptor.stop(elsewhere, keeps)
        finally:
            PATCHES.release(self)
            if is_left:
                self.backward.release()
                if not elsewhere and not runs_backward():
                    clear_hooks()
                if not keeps:
                    self._sites.clear()
            if self._compiled is not None:
                self._compiled.end()
                self._compiled = None
        if keeps:
            for record in self._sites:
                record.settle(self.session.epoch)
            self.session.persistent(_KEPT, list[TorchAttachment])[:] = [self]
        self._attached = False

    def ask(self) -> None:
        """Let threads that are not intercepted ask again whether they are to be."""
        self._interceptor.ask()

    def changed(self) -> None:
        """Forget edited parameters while tools are disabled: writes are not seen then."""
        self._interceptor.ask()
        COMPILED.is_split = any(tool.needs_whole for tool in self.session.tools)
        if not self.session.enabled:
            forget_all_edited()

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what is not instrumented, and why."""
        return [
            *self._interceptor.coverage(),
            CoverageGap("torch.func transforms", "values are wrapped and have no graph to edit"),
            CoverageGap(
                "tracing, scripting, export, FakeTensor modes", "they run the model on fake tensors"
            ),
            *self._compiled_gaps(),
            device_graphs.GAP,
            CoverageGap("Triton kernels, torch.cuda.jiterator", "they bypass torch's operators"),
            *_other_threads(self.session),
            CoverageGap(
                "gradients of gradients in the first backward pass with create_graph",
                "ops found to need no tool before are analysed again from the next pass on",
            ),
            *(CoverageGap(name, "not known to be an operator") for name in unknown_bindings()),
            *(CoverageGap(what, why) for what, why in self.backward.unseen.items()),
        ]

    # Compiled callables.

    def _compiled_gaps(self) -> list[CoverageGap]:
        gaps = [CoverageGap("exported and ahead-of-time compiled programs", "no graph is traced")]
        if reason := why_eager(self._interceptor.name):
            why = f"they run eagerly while tools are applied: {reason}"
            gaps.append(CoverageGap("compiled callables", why))
        if self._compiled is not None:
            gaps += [CoverageGap(*gap) for gap in self._compiled.gaps.items()]
        return gaps

    def why_eager(self, function: Any) -> str:
        """Return why a compiled function runs eagerly now; an empty string if it stays compiled."""
        what, why = "compiled callables", "the driver failed there"
        return self.attempt(what, why, self._why_eager, function)

    def _why_eager(self, function: Any) -> str:
        if why := why_eager(self._interceptor.name):
            return why
        try:
            return self._compiled_code().why_not(function)
        except (AttributeError, ImportError) as error:
            return f"parts of Dynamo are missing ({error})"

    def compiled_callback(self, original: Any) -> Any:
        """Return what Dynamo must call for a compiled callable; None to run it eagerly."""
        what = "compiled callables"
        return self.attempt(what, None, lambda: self._compiled_code().callback(original))

    def exported(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a model with the edits of the tools as a `torch.export.ExportedProgram`."""
        from amanda_driver_torch.compiled.exported_program import exported_program
        from amanda_driver_torch.compiled.refusals import not_exported

        if why := why_eager(self._interceptor.name):
            raise not_exported(why)
        return exported_program(model, args, kwargs, self._compiled_code())

    def _compiled_code(self) -> CompiledCode:
        if self._compiled is None:
            from amanda_driver_torch.compiled.callbacks import CompiledCode

            session = self.session
            self._compiled = session.persistent("pytorch.compiled", CompiledCode)
            namespace = f"pytorch/{RELEASE}/compiled"
            sites = self._new_sites(None, namespace, lambda site, _: site, lambda site: None)
            self._compiled.begin(
                session, sites, self._execution.constant, self.enter_module, PATCHES.add
            )
        return self._compiled

    @property
    def edits(self) -> int:
        """Number of values edited and operators replaced so far."""
        return self._execution.edits

    def watching(self) -> bool:
        """Return True if operators that this thread calls now are instrumented."""
        return (
            STATE.attachment is self
            and not STATE.quiet
            and not STATE.opaque
            and self.session.enabled
        )

    # Operators.

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
        if record is None or is_machinery(record.caller):
            return call(*args, **kwargs)
        return self._execution(record, operator, call, args, kwargs)

    def execute_known(
        self,
        record: OpRecord,
        operator: Operator,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Execute one call of an operator whose record the native interceptor has found."""
        # What was resolved for this call was not to be ignored.
        new, self._new = record is self._new, None
        if not new and self._is_ignored(operator.op_type, args, kwargs):
            return call(*args, **kwargs)
        run = Run(self._execution, record, operator, call, args, kwargs)
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
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
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
        if reason:
            self.session.warn_once(reason)
            self.attempt(op_type, None, self._note_unseen, op_type, (*args, *kwargs.values()))
        return reason is not None

    def _note_unseen(self, op_type: str, values: Sequence[Any]) -> None:
        """Note an operator inside a transform, with the parameters that it reads."""
        scope = STATE.activations[-1].scope if STATE.activations else OUTSIDE
        weights = {}
        for value in map(unwrapped, values):
            if isinstance(value, torch.Tensor):
                found = self._parameters.find(value, scope.root, operand=False)
                if found is not None:
                    weights[f"{found.root}:{found.name}"] = found.shape
        op = f"{scope.path}/{op_type}" if scope.path else op_type
        self.session.note_call(op, "inside torch.func transforms", weights)

    def _hides(self, operator: Operator, record: OpRecord) -> bool:
        """Return True if torch turns a TypeError in this call into NotImplemented."""
        if self._interceptor.hides_type_errors and operator.op_type.removesuffix("_") in _BINARY:
            return True
        # torch's reflected operators are Python functions whose decorator does so.
        return record.caller == TENSOR_METHODS

    def execute_python(
        self,
        raw: Any,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Execute one call of an operator written in Python or as a script."""
        operator = self.attempt(name, None, Operator, raw, raw, name)
        if operator is None:
            return call(*args, **kwargs)
        # A module called in its body ends this: the operator is then treated as a container.
        run = self.execute, operator, in_users_modes(call), args, kwargs
        return call_opaquely(call_without_modes, *run)

    def execute_collective(
        self,
        collective: Collective,
        call: Callable[..., Any],
        group: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
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
        self,
        collective: Collective,
        call: Callable[..., Any],
        group: Any,
        args: tuple[Any, ...],
        bucket: Bucket,
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

    def watch_second_order(self) -> None:
        """Analyse gradients of gradients, too, from now on."""
        self.backward.second_order = True
        if self.watch is not None:
            self.watch.second_order = True

    def _drop(self, record: OpRecord) -> None:
        # A weight that was converted while no tools were applied is not known again, but its op is.
        if record.kept:
            return
        for context in (record.context, *(node.context for node in record.nodes.values())):
            if context is not None:
                self.session.forget(context)


def _other_threads(session: Session) -> list[CoverageGap]:
    if session.turn is not None:
        return []
    what = "threads other than the one that entered `apply`"
    return [CoverageGap(what, 'they run without tools; threads="all" instruments them')]


def _constant_in(scopes: Scopes) -> Callable[[Any], Any]:
    """Return a function that maps parameters, buffers and non-tensors to themselves, other inputs
    to None.
    """

    def constant(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
            return value
        known = is_weight(value) or any(has_buffer(root, value) for root in scopes.roots())
        return value if known else None

    return constant


def _detach_in_child() -> None:
    # A forked process, such as a data loader's worker, runs without tools.
    if STATE.attachment is not None:
        STATE.attachment.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_in_child)
