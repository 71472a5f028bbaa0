"""`TorchAttachment`: attaches one session to PyTorch.

Owns the start and end of the driver's parts (sites, execution, backward program, interceptor,
patches), and the calls of modules. `_execution` decides what happens at an operator. The module is
over 400 lines because it is the one interface of all entry points.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from amanda_core import CoverageGap, Session, Site
from amanda_core.calls import MODULE_INPUT, MODULE_OUTPUT
from amanda_core.interceptors import NATIVE
from amanda_core.scopes import OUTSIDE, Activation, Scope, Scopes
from amanda_core.sites import Operands, Origin, Sites
from amanda_core.weights.state import forget_all_edited
from amanda_driver_torch._autograd.backward import Backward
from amanda_driver_torch._autograd.records import OpRecord
from amanda_driver_torch._compiled.choice import why_eager
from amanda_driver_torch._entry import device_graphs
from amanda_driver_torch._entry.checkpoint import is_foreign_rerun
from amanda_driver_torch._entry.function_mode import FunctionModeInterceptor
from amanda_driver_torch._entry.interceptor import Interceptor
from amanda_driver_torch._entry.interceptor_choice import INTERCEPTORS
from amanda_driver_torch._entry.module_values import replace_first, unchanged
from amanda_driver_torch._entry.patches import PATCHES
from amanda_driver_torch._entry.tracing import reason_to_ignore
from amanda_driver_torch._execution.execute import Execution
from amanda_driver_torch._identity.leaves import Leaves
from amanda_driver_torch._identity.rules import (
    BOUNDARY,
    RULES,
    new_labels,
    new_parameters,
    new_scopes,
)
from amanda_driver_torch._operators.bindings import unknown_bindings
from amanda_driver_torch._operators.operator import Operator
from amanda_driver_torch._thread.modes import in_users_modes, suspended_modes
from amanda_driver_torch._thread.state import STATE, opaquely, quietly
from amanda_driver_torch._torch.facts import FACTS
from amanda_driver_torch._torch.internals import (
    RELEASE,
    TENSOR_METHODS,
    has_buffer,
    is_machinery,
)
from amanda_driver_torch._torch.tensor_attributes import is_weight

if TYPE_CHECKING:
    from amanda_driver_torch._compiled.callbacks import CompiledCode

__all__ = ["NAMESPACE", "TorchAttachment"]

T = TypeVar("T")

NAMESPACE = f"pytorch/{RELEASE}/eager"

# These operators represent the values of modules. They have one input and return it.
_INPUT = Operator(unchanged, unchanged, MODULE_INPUT)
_OUTPUT = Operator(unchanged, unchanged, MODULE_OUTPUT)

# torch's C bindings of these turn any TypeError into NotImplemented, even a routine's own.
_BINARY = frozenset(
    {"add", "sub", "rsub", "mul", "div", "matmul", "pow", "remainder", "floor_divide", "fmod"}
    | {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"}
    | {"eq", "ne", "lt", "le", "gt", "ge"}
)


class TorchAttachment:
    """Instruments the operators of one thread, and their backward ops in any thread.

    Attributes:
        session: The session.
        scopes: The modules that have been called.
        backward: The backward program.
        watch: The native extension's part of the interceptor, or None.
    """

    facts = FACTS

    def __init__(self, session: Session) -> None:
        self.session = session
        self.scopes = session.persistent("pytorch.scopes", new_scopes)
        labels = session.persistent("pytorch.labels", new_labels)
        parameters = session.persistent(
            "pytorch.parameters", lambda: new_parameters(self.scopes, labels)
        )
        parameters.sessions += 1
        self._sites: Sites[OpRecord] = Sites(
            RULES,
            STATE,
            self.scopes,
            labels,
            session.persistent("pytorch.names", dict),
            NAMESPACE,
            OpRecord,
            self._drop,
            parameters,
        )
        self.backward = Backward(session, Leaves(self.scopes, labels), NAMESPACE)
        #: What observers did not see -> the reason.
        self._unseen: dict[str, str] = session.persistent("pytorch.unseen", dict)
        self._execution = Execution(
            session, self.backward, _constant_in(self.scopes), self._unseen.__setitem__, self._hides
        )
        self._interceptor = self._choose()
        self.watch = self._execution.watch = self._interceptor.watch
        self._labels, self._parameters = labels, parameters
        #: Checkpointed functions that run for the first time now, from the outermost one.
        self.first_runs: list[Any] = []
        self._compiled: CompiledCode | None = None
        #: The record that was made last, until its first execution.
        self._new: object = None
        self._attached = False

    def _choose(self) -> Interceptor:
        """Return the requested interceptor, or the best available one."""
        if INTERCEPTORS.choice().name == NATIVE:
            from amanda_driver_torch._entry.native_interceptor import NativeInterceptor

            return NativeInterceptor(self, self._execution, self._sites)
        return FunctionModeInterceptor(self, self._sites)

    def attach(self) -> None:
        """Start intercepting in this thread."""
        why_eager(self._interceptor.name)  # A setting that does not exist is refused.
        PATCHES.acquire()
        self._attached = True
        STATE.attachment = self
        STATE.not_compiled = {}
        self._interceptor.start()

    def detach(self) -> None:
        """Stop intercepting and restore everything."""
        if not self._attached:
            return
        self._attached = False
        STATE.attachment = None
        STATE.activations.clear()
        self.watch = None
        self._execution.watch = None
        try:
            self._interceptor.stop()
        finally:
            PATCHES.release()
            self.backward.release()
            self._sites.clear()
            if self._compiled is not None:
                self._compiled.end()
                self._compiled = None

    def changed(self) -> None:
        """Forget edited parameters while tools are disabled: writes are not seen then."""
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
            CoverageGap(
                "threads other than the one that entered `apply`", "they run without tools"
            ),
            CoverageGap(
                "gradients of gradients in the first backward pass with create_graph",
                "ops found to need no tool before are analysed again from the next pass on",
            ),
            *(CoverageGap(name, "not known to be an operator") for name in unknown_bindings()),
            *(CoverageGap(what, why) for what, why in self._unseen.items()),
        ]

    # Compiled callables.

    def _compiled_gaps(self) -> list[CoverageGap]:
        gaps = [CoverageGap("exported and ahead-of-time compiled programs", "no graph is traced")]
        reason = why_eager(self._interceptor.name)
        if reason:
            why = f"they run eagerly while tools are applied: {reason}"
            gaps.append(CoverageGap("compiled callables", why))
        if self._compiled is not None:
            gaps += [CoverageGap(*gap) for gap in self._compiled.gaps.items()]
        return gaps

    def why_eager(self) -> str:
        """Return why compiled callables run eagerly now; an empty string if they stay compiled."""
        failed = "the driver failed there"
        return self.attempt("compiled callables", failed, self._why_eager)

    def _why_eager(self) -> str:
        return why_eager(self._interceptor.name) or self._compiled_code().why_not()

    def compiled_callback(self, original: Any) -> Any:
        """Return what Dynamo must call for a compiled callable; None to run it eagerly."""
        return self.attempt(
            "compiled callables", None, lambda: self._compiled_code().callback(original)
        )

    def _compiled_code(self) -> CompiledCode:
        if self._compiled is None:
            from amanda_driver_torch._compiled.callbacks import CompiledCode

            session = self.session
            self._compiled = session.persistent("pytorch.compiled", CompiledCode)
            sites: Sites[Site] = Sites(
                RULES,
                None,
                self.scopes,
                self._labels,
                session.persistent("pytorch.names", dict),
                f"pytorch/{RELEASE}/compiled",
                lambda site, caller: site,
                lambda site: None,
                self._parameters,
            )
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

    def report_failure(self, error: Exception, where: str) -> None:
        """Raise an error of the driver, or list it so that the program can go on.

        Args:
            error: The error.
            where: The type of the operator, or what else of the program the driver was at.
        """
        failures = self.session.failures
        if not failures.is_drivers(error):
            raise error
        failures.note(error, NAMESPACE, where)

    def attempt(self, where: str, otherwise: T, work: Callable[..., T], *arguments: Any) -> T:
        """Do work of the driver that runs nothing of the program.

        Args:
            where: As for `report_failure`.
            otherwise: What to return if it fails and the program goes on.
            work: Does the work.
            arguments: Its arguments.
        """
        try:
            return work(*arguments)
        except Exception as error:
            self.report_failure(error, where)
            return otherwise

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
        original = self.session.failures.original(call)
        return self._execution.run(record, operator, original, args, kwargs, by_native=True)

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
            return None if is_machinery(found.caller) else found
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
        return reason is not None

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
        with opaquely(), suspended_modes():
            return self.execute(operator, in_users_modes(call), args, kwargs)

    def watch_second_order(self) -> None:
        """Analyse gradients of gradients, too, from now on."""
        self.backward.second_order = True
        if self.watch is not None:
            self.watch.second_order = True

    # Modules.

    def call_module(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module inside its scope."""
        activations = STATE.activations
        try:
            scope = self.enter_module(module, activations[-1] if activations else None)
            activation = self._interceptor.activation(scope)
        except Exception as error:
            self.report_failure(error, f"calls of {type(module).__name__}")
            return original(module, *args, **kwargs)
        session, path = self.session, activation.scope.path
        if STATE.opaque and STATE.backward and is_foreign_rerun():
            with quietly():
                return original(module, *args, **kwargs)
        # A recomputation is a part of the call that it belongs to.
        is_call = session.watches_calls and not activations and not STATE.backward
        opaque, STATE.opaque = STATE.opaque, 0
        recomputing, STATE.recomputing = (
            STATE.recomputing,
            STATE.recomputing or bool(opaque and STATE.backward),
        )
        activations.append(activation)
        try:
            if is_call:
                root = activation.scope.root
                epoch = session.epoch
                self.attempt(path, None, session.calls.enter, NAMESPACE, root, args, kwargs)
                if session.epoch != epoch:
                    for run in self.first_runs:
                        run.take_epoch()
            if session.watches_scopes:
                session.enter_scope(path)
            with self._interceptor.inside() if opaque else nullcontext():
                if session.watches_values and session.calls.shows(MODULE_INPUT, path):
                    values = args, kwargs
                    args, kwargs = self.attempt(
                        path, values, replace_first, values, self._shown_input
                    )
                result = original(module, *args, **kwargs)
                if session.watches_values and session.calls.shows(MODULE_OUTPUT, path):
                    result = self.attempt(path, result, replace_first, result, self._shown_output)
            session.raise_pending()
            return result
        except BaseException as error:
            self.module_failed(error)
            raise
        finally:
            if activations and activations[-1] is activation:
                activations.pop()  # Unless the tools were removed inside the call.
            STATE.opaque, STATE.recomputing = opaque, recomputing
            if session.watches_scopes:
                session.leave_scope(path)
            if is_call:
                session.calls.leave()

    def _shown_input(self, value: torch.Tensor) -> Any:
        with suspended_modes():
            return self.execute(_INPUT, unchanged, (value,), {})

    def _shown_output(self, value: torch.Tensor) -> Any:
        with suspended_modes():
            return self.execute(_OUTPUT, unchanged, (value,), {})

    def enter_module(self, module: nn.Module, parent: Activation | None) -> Scope:
        """Return the scope of a module called inside `parent`."""
        outer = parent.scope if parent is not None else None
        scope = self.scopes.enter(module, outer, STATE.backward > 0)
        if self.scopes.dead:
            self._sweep()
        return scope

    def trace_module(
        self, module: nn.Module, parent: Activation | None
    ) -> tuple[Scope, list[tuple[nn.Module, str]]]:
        """Return the scope of a module and what it depends on, for the native interceptor."""
        scope = self.enter_module(module, parent)
        outer = parent.scope if parent is not None else None
        return scope, self.scopes.holders(module, scope, outer)

    def module_failed(self, error: BaseException) -> None:
        """Raise a routine's pending exception instead of `error`, which leaves a module's call."""
        # torch may have turned a routine's TypeError into "unsupported operand".
        self.session.raised(error)
        self.session.raise_pending()

    @contextmanager
    def resumed(self, activations: list[Activation]) -> Iterator[None]:
        """Restore the state of the first run during a recomputation, on whatever thread it runs."""
        control = self.session.control
        before = (
            STATE.attachment,
            STATE.activations,
            STATE.opaque,
            STATE.recomputing,
            control.enabled,
        )
        STATE.attachment, STATE.activations = self, activations
        STATE.opaque, STATE.recomputing, control.enabled = 0, True, True
        try:
            with self._interceptor.inside():
                yield
        finally:
            (
                STATE.attachment,
                STATE.activations,
                STATE.opaque,
                STATE.recomputing,
                control.enabled,
            ) = before

    def _drop(self, record: OpRecord) -> None:
        for context in (record.context, *(node.context for node in record.nodes.values())):
            if context is not None:
                self.session.forget(context)

    def _sweep(self) -> None:
        """Forget contexts of models that are gone, and of paths that got another module."""
        dead = set(self.scopes.take_dead())

        def gone(key: Any) -> bool:
            root, path = _place_of(key)
            return (root, None) in dead or (root, path) in dead

        for context in self.session.contexts():
            owner = context.forward if context.forward is not None else context
            if gone(owner.site.key):
                self.session.forget(context)
        self._sites.discard(lambda record: gone(record.site.key))
        self._interceptor.forget()
        self.scopes.free(root for root, path in dead if path is None)


# The native interceptor calls it without a frame of the replaced `Module.__call__`.
BOUNDARY[id(TorchAttachment.call_module.__code__)] = TorchAttachment.call_module.__code__


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


def _place_of(key: Any) -> tuple[str | None, str | None]:
    """Return the root and module path in the key of an op or of a leaf's gradient accumulation."""
    if key[0] == "op":
        return key[1], key[2]
    if key[0] == "accumulate" and key[1][0] == "parameter":
        return key[1][1], key[1][2].rpartition(".")[0]
    return None, None


def _detach_in_child() -> None:
    # A forked process, such as a data loader's worker, runs without tools.
    if STATE.attachment is not None:
        STATE.attachment.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_in_child)
