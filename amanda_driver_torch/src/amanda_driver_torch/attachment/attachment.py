"""`TorchAttachment`: attaches one session to PyTorch.

Owns the start and end of the driver's parts (sites, execution, backward program, interceptor,
patches), and what of compiled callables they let stay compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from amanda_core.driver_kit import (
    NATIVE,
    Labels,
    Parameters,
    Session,
    Sites,
    forget_all_edited,
)
from amanda_core.interface import CoverageGap, Site
from amanda_driver_torch.attachment.module_calls import NAMESPACE
from amanda_driver_torch.attachment.operator_calls import OperatorCalls
from amanda_driver_torch.compiled.choice import why_eager
from amanda_driver_torch.execution.execute import Execution
from amanda_driver_torch.execution.reductions import Reductions, clear_hooks
from amanda_driver_torch.facts import FACTS
from amanda_driver_torch.gradients.backward import Backward
from amanda_driver_torch.gradients.records import OpRecord
from amanda_driver_torch.identity.constants import Constants
from amanda_driver_torch.identity.leaves import Leaves
from amanda_driver_torch.identity.rules import LAYOUTS, RULES, new_scopes
from amanda_driver_torch.interception import device_graphs
from amanda_driver_torch.interception.forward_calls import ForwardCalls
from amanda_driver_torch.interception.function_mode import FunctionModeInterceptor
from amanda_driver_torch.interception.fused_inference import COMPILED
from amanda_driver_torch.interception.interceptor import Interceptor
from amanda_driver_torch.interception.interceptor_choice import INTERCEPTORS
from amanda_driver_torch.interception.joining import ThreadState
from amanda_driver_torch.interception.patches import PATCHES
from amanda_driver_torch.operators.bindings import unknown_bindings
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.internals import RELEASE, runs_backward

if TYPE_CHECKING:
    from amanda_driver_torch.compiled.callbacks import CompiledCode

__all__ = ["TorchAttachment"]

R = TypeVar("R")
#: Name of what is kept of a session for the next one of the same tools.
_KEPT = "pytorch.attachment"


class TorchAttachment(OperatorCalls):
    """Instruments the operators of one thread, and their backward ops in any thread.

    Attributes:
        session: The session.
        scopes: The modules that have been called.
        backward: The backward program.
        watch: The native extension's part of the interceptor, or None.
    """

    facts = FACTS

    def __init__(self, session: Session) -> None:
        self._connect(session)
        self.backward = Backward(session, Leaves(self.scopes, self._labels), NAMESPACE)
        self._begin_to_execute()
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
        self._begin_to_execute()
        interceptor: Any = self._interceptor
        interceptor.resume(self._execution)
        self.watch = self.backward.watch = interceptor.watch
        self.watch.second_order = False

    def _connect(self, session: Session) -> None:
        self.session = session
        self.scopes = session.shared("pytorch.scopes", new_scopes)
        self._labels = session.shared("pytorch.labels", Labels)
        self._parameters = session.shared(
            "pytorch.parameters", lambda: Parameters(self.scopes, self._labels, LAYOUTS)
        )
        self._parameters.sessions += session.host is None
        self.forward_calls = ForwardCalls(session, PATCHES.add)
        #: Checkpointed functions that run for the first time now, from the outermost one.
        self.first_runs: list[Any] = []
        self._compiled: CompiledCode | None = None
        self._new = None
        self._attached = False

    def _begin_to_execute(self) -> None:
        constant = Constants(self.scopes)
        self._execution = Execution(self.session, self.backward, constant, self._hides)
        self.reductions = Reductions(self.session, self.scopes, self.backward, NAMESPACE)

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
            CoverageGap(
                "torch.func transforms",
                "operators inside are shown to tools with `sees_transforms` alone, without their "
                "gradients and backward operators",
            ),
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
            return self._compiled_code().tools.why_not(function)
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
        return self._execution.edits + (0 if self.watch is None else self.watch.edits)

    def watching(self) -> bool:
        """Return True if operators that this thread calls now are instrumented."""
        return (
            STATE.attachment is self
            and not STATE.quiet
            and not STATE.opaque
            and self.session.enabled
        )

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


def _detach_in_child() -> None:
    # A forked process, such as a data loader's worker, runs without tools.
    if STATE.attachment is not None:
        STATE.attachment.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_in_child)
