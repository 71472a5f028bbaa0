"""`FunctionMode`: functions that TensorFlow executes, instrumented as they are called.

Owns the interception of calls, the decision when a function gets a twin, and how values of a
forward function reach the gradient function that a tape calls later. `function_rewriting` builds
the twins. The module is over 400 lines because it follows one path, from a call to its gradients.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from amanda_core import CoverageGap, Session
from amanda_core.errors import UnsupportedError
from amanda_core.frame_locals import local_of
from amanda_core.patching import Patches
from amanda_driver_tf._functions.twins import UNKNOWN, Gradients, Twin, Twins, remove
from amanda_driver_tf._graphs import records
from amanda_driver_tf._graphs.analysis import Analysis, OpPlans
from amanda_driver_tf._graphs.constants import Constants
from amanda_driver_tf._graphs.records import GRAPHS, Records, children_of, name_of
from amanda_driver_tf._insertion.marks import OP_TYPE
from amanda_driver_tf._insertion.shape_checks import failed_check_error
from amanda_driver_tf._rewriting.function_rewriting import (
    Call,
    FunctionRewriter,
    with_names_of_program,
)
from amanda_driver_tf._rewriting.mode import Mode
from amanda_driver_tf._rewriting.rewritten_function import RewrittenFunction
from amanda_driver_tf._shared.namespaces import FUNCTION
from amanda_driver_tf._shared.state import STATE
from amanda_driver_tf._tensorflow_internals.entry_points import (
    CALL_FUNCTION,
    RECORD_BACKPROP_ONLY,
    RECORD_OPERATION,
    SELECT_FUNCTIONS,
)
from amanda_driver_tf._tensorflow_internals.modules import (
    context,
    dtypes,
    errors,
    forwardprop_util,
    ops,
    record,
)
from amanda_driver_tf._tensorflow_internals.objects import graph_of_function, set_message

__all__ = ["FunctionMode"]

# Two threads must not rewrite at the same time, since they may read and change the same graphs.
_BUILDING = threading.RLock()


class _ForwardPlans(Analysis):
    """Plans of forward ops only, without running analysis routines.

    They tell which versions of values exist.

    Args:
        analysis: The whole analysis.
        aligned: Whether to include plans at gradients.
    """

    def __init__(self, analysis: Analysis, aligned: bool) -> None:
        self._whole, self._aligned = analysis, aligned

    def is_backward(self, op: Any) -> bool:
        """Return True if an op belongs to the backward program."""
        return self._whole.is_backward(op)

    def plans_of(self, op: Any, analyse: bool = False) -> OpPlans | None:
        """Return the plans of a forward op; None for other ops."""
        if self.is_backward(op):
            return None
        plans = self._whole.plans_of(op, analyse=False)
        if plans is None or self._aligned:
            return plans
        return plans.unaligned()


class _SavedPlans(Analysis):
    """Plans as they were when a forward function ran.

    Args:
        analysis: The whole analysis.
        plans: The plans of its ops, including backward ops, by label and name.
    """

    def __init__(self, analysis: Analysis, plans: dict[tuple[str, str], OpPlans]) -> None:
        self._whole, self._kept = analysis, plans

    def is_backward(self, op: Any) -> bool:
        """Return True if an op belongs to the backward program."""
        return self._whole.is_backward(op)

    def plans_of(self, op: Any, analyse: bool = False) -> OpPlans | None:
        """Return the plans of an op; None if it had none."""
        return self._kept.get((self._whole.label(op.graph), op.name))


class _SavedResults:
    """Extra results of a call of a forward twin, saved for the gradients of that very call.

    Attributes:
        mode: The mode that made the call.
        function: The original function.
        twin: The twin.
        tensors: The twin's results beyond those of the original.
        earlier: The saved results passed to the call itself, if it was the call of a gradient.
        graph: The function's graph, which might otherwise be gone before its gradient is computed.
    """

    __slots__ = ("earlier", "function", "graph", "mode", "tensors", "twin")

    def __init__(
        self,
        mode: FunctionMode,
        function: str,
        twin: Twin,
        tensors: list[Any],
        earlier: _SavedResults | None,
    ) -> None:
        self.mode, self.function, self.twin, self.tensors = mode, function, twin, tensors
        self.earlier = earlier
        self.graph = GRAPHS.get(function)

    def refuse_in_graph(self) -> None:
        """Refuse to build the gradient into a graph, which cannot receive the saved results."""
        # If every routine returned None, the gradient reads the original values.
        demanded = any(self.twin.gradients.values()) and self.twin.has_edited()
        if not demanded and not (self.twin.is_aligned and _is_vectorised()):
            return
        error = UnsupportedError(
            f"Ops of the function {self.function!r} were edited, and its gradient is computed "
            "while TensorFlow builds a graph (by tape.jacobian or batch_jacobian with pfor, or by "
            "a function that contains tape.gradient but not the tape)",
            fix="Pass experimental_use_pfor=False, or move the tape into the function",
        )
        error.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph keeps it as it is.
        raise error


_NOT_SPREAD = re.compile(rf"'tf\.(EagerPyFunc|{OP_TYPE})' op does not implement layout propagation")


def _spread(error: BaseException) -> UnsupportedError | None:
    """Return the refusal of a host routine in a DTensor function, if `error` was raised by one."""
    if not _NOT_SPREAD.search(str(error)):
        return None
    return UnsupportedError(
        "A host routine was inserted into a function that runs on DTensors",
        fix="Mark the routine with @amanda.staged",
    )


def _is_vectorised() -> bool:
    """Return True if pfor's loop body is being built, whose ops pfor makes again."""
    graph = ops.get_default_graph()
    while graph is not None:
        if "loop_body" in (graph.get_name_scope() or "").split("/"):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


class FunctionMode(Mode):
    """Instruments the functions that one thread calls.

    Args:
        session: The session whose tools instrument them.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session, _PATCHES, "function")
        self._constants = Constants()
        self._analysis = Analysis(session, FUNCTION, self._constants)
        self._twins = session.persistent("tensorflow.twins", Twins)

    def start(self) -> None:
        """Start intercepting calls in this thread."""
        super().start()
        STATE.functions = self

    def stop(self) -> None:
        """Stop intercepting calls; does nothing if not started."""
        if self.is_started:
            STATE.functions = None
        super().stop()

    def coverage(self) -> Sequence[CoverageGap]:
        """Return the gaps in the coverage of functions."""
        return [
            CoverageGap("tf.data functions", "they run in TensorFlow's input pipeline"),
            CoverageGap(
                "gradients that pfor vectorises (Jacobians)",
                "pfor makes new ops for them, which are seen as forward ops",
            ),
            CoverageGap(
                "constants, placeholders, calls and control flow", "they hold or steer values"
            ),
            *(CoverageGap(what, why) for what, why in self._gaps.items()),
        ]

    # Calls.

    def run(
        self,
        call: Callable[..., Any],
        name: bytes,
        inputs: list[Any],
        count: int,
        saved: _SavedResults | None,
    ) -> Any:
        """Call a function or its twin.

        Args:
            call: Calls a function by name, with its inputs and number of outputs.
            name: The function.
            inputs: Its inputs.
            count: The number of its outputs.
            saved: The saved results of its forward function, if it is the function of a gradient.
        """
        session = self.session
        function = name.decode()
        if saved is not None and GRAPHS.get(function) not in saved.twin.gradients:
            saved = None
        if not session.enabled and saved is None:
            return call(name, inputs, count)
        try:
            twin = self._twin(function, inputs, saved)
        except Exception as error:
            if not session.failures.is_drivers(error):
                raise
            # The gradient of an instrumented function cannot run without the saved results.
            where, plain = f"the function {function!r}", saved is None
            session.failures.note(error, "tensorflow", where, can_go_on=plain)
            twin = None
        outermost = STATE.running == 0 and "__forward_" not in function
        outermost = outermost and "__backward_" not in function
        waits = twin is not None and context.is_async()
        self._listener.listen(session)
        STATE.running += 1
        try:
            if twin is None:
                outputs = call(name, inputs, count)
            else:
                outputs = self._run_twin(call, function, twin, inputs, count, saved, waits)
        except BaseException as error:
            self._raise_own(error, waits)
            raise
        finally:
            STATE.running -= 1
        session.raise_pending()
        if outermost and session.enabled:
            session.end_step()
        return outputs

    def _raise_own(self, error: BaseException, waits: bool) -> None:
        """Raise the exception behind TensorFlow's error: a routine's own, or a refusal."""
        try:
            self.session.raised(error)
            self.session.raise_pending()
            refused = failed_check_error(error) or _spread(error)
            if refused is not None:
                raise refused from error
            if isinstance(error, errors.OpError):
                # TensorFlow finds the lines of the program by the names of its own functions.
                set_message(error, with_names_of_program(error.message))
        except BaseException:
            if waits:
                context.async_clear_error()  # Otherwise everything that runs later would raise it.
            raise

    def _run_twin(
        self,
        call: Callable[..., Any],
        function: str,
        twin: Twin,
        inputs: list[Any],
        count: int,
        saved: _SavedResults | None,
        waits: bool,
    ) -> Any:
        if twin.takes:
            assert saved is not None
            chosen = saved.twin.gradients[GRAPHS[function]]
            inputs = [*inputs, *(saved.tensors[index] for index in chosen)]
        outputs = call(twin.name, inputs, count + twin.results)
        if waits:
            context.async_wait()  # An exception of a routine must be raised by this call.
        # Only after the call is it known whether routines edited anything or returned None.
        if not twin.takes and _is_followed(function) and twin.has_edited():
            raise UnsupportedError(
                f"Ops of the function {function!r} were edited, and it runs under a "
                "tf.autodiff.ForwardAccumulator, which does not support that",
                fix="Leave the accumulator out, or use a tf.GradientTape",
            )
        if not twin.gradients and not twin.watched:
            return outputs
        outputs = outputs or []
        made, extra = outputs[:count], outputs[count:]
        STATE.saved_results = (made, _SavedResults(self, function, twin, list(extra), saved))
        return made or None

    # Twins.

    def _twin(
        self, function: str, inputs: Sequence[Any], saved: _SavedResults | None
    ) -> Twin | None:
        session = self.session
        silent = not session.enabled
        key = (session.epoch, silent, saved.twin.number if saved is not None else 0)
        if session.caching or silent:
            known: Twin | None = self._twins.get(function, key)
            if known is not UNKNOWN:
                return known
        with _BUILDING, _quiet_graph():
            try:
                twin = self._build(function, inputs, saved, silent)
            except UnsupportedError as refused:
                # Routines that return None can still run, as observers.
                twin = self._build(function, inputs, saved, silent, refused)
        # An analysis routine may have invalidated a tool, which changes the epoch.
        if session.caching or silent:
            self._twins.put(function, (session.epoch, *key[1:]), twin)
        return twin

    def _build(
        self,
        function: str,
        inputs: Sequence[Any],
        saved: _SavedResults | None,
        silent: bool,
        refused: UnsupportedError | None = None,
    ) -> Twin | None:
        definition = context.context().get_function_def(function)
        graph = GRAPHS.get(function)
        kept = Records.of(graph) if graph is not None else None
        if silent and kept is not None and kept.recomputes():
            raise UnsupportedError(
                f"The gradient function {function!r} reruns forward ops, which were edited by "
                "tools that are no longer active",
                fix="Compute the gradient inside amanda.apply",
            )
        if graph is not None:
            self._constants.handles = {
                id(placeholder.op): value
                for placeholder, value in zip(graph.inputs, inputs, strict=False)
                if value.dtype == dtypes.resource
            }
        self._analysis.sweep()
        definitions = _Definitions(saved)
        rewriter = FunctionRewriter(self.session, self._analysis, definitions, self._add_gap)
        try:
            forward = None
            if saved is not None:
                forward = self._forward(rewriter, saved)
            rewriter.refused = refused
            bare = _ForwardPlans(self._analysis, False) if silent else None
            rewritten = rewriter.rewrite(function, Call(forward=forward, analysis=bare))
            if rewritten is None:
                return None
            gradients = None
            if "__forward_" in function:
                gradients = self._export_values(rewriter, rewritten, definitions)
            name = rewriter.write(rewritten)
            watched = self._is_watched(rewritten)
            if name is None and not watched:
                return None
            if saved is not None:
                chosen = saved.twin.gradients[GRAPHS[function]]
                if len(chosen) != len(rewritten.demands):
                    raise UnsupportedError(
                        f"The gradient function {function!r} needs values that its forward pass "
                        "did not save",
                        fix="Run the forward pass again",
                    )
            return Twin(
                (name or function).encode(),
                rewriter.written,
                len(rewritten.results),
                gradients,
                takes=bool(rewritten.demands),
                watched=watched,
                is_edited=rewritten.is_edited(),
                is_aligned=not silent and self._analysis.is_aligned(),
                definition=definition if gradients else None,
                plans=self._analysis.plans_kept(at_gradients=not silent) if gradients else None,
            )
        except BaseException:
            remove(tuple(rewriter.written.names))  # No twin owns the functions written so far.
            raise
        finally:
            self._constants.handles = {}
            self._constants.calls.clear()  # An error may have left some.
            self._analysis.forget()

    def _is_watched(self, rewritten: RewrittenFunction) -> bool:
        """Return True if routines will run when the gradient of a function is computed."""
        if "__forward_" not in rewritten.name:
            return False
        return self.session.wants_backward or any(
            plans is not None and (plans.aligned_before or plans.aligned_after)
            for plans in map(self._analysis.known, (node.op for node in rewritten.body.nodes))
        )

    def _forward(
        self, rewriter: FunctionRewriter, saved: _SavedResults
    ) -> RewrittenFunction | None:
        """Rewrite the forward function again as it was for the twin that saved the results."""
        earlier = self._forward(rewriter, saved.earlier) if saved.earlier else None
        kept = _SavedPlans(self._analysis, saved.twin.plans)
        return rewriter.rewrite(saved.function, Call(forward=earlier, analysis=kept))

    def _export_values(
        self, rewriter: FunctionRewriter, rewritten: RewrittenFunction, definitions: _Definitions
    ) -> Gradients:
        """Make a forward function return the values that its gradient functions need.

        Returns:
            For each gradient function's graph, the indices of these values among the new results.
        """
        found: Gradients = weakref.WeakKeyDictionary()
        if not (rewritten.is_edited() or self._analysis.is_edited()):
            return found  # Its gradients read original values only.
        for child in children_of(rewritten.body.graph):
            gradient = name_of(child)
            if not definitions.knows(gradient):
                continue
            asked = rewriter.rewrite(
                gradient, Call(forward=rewritten, analysis=_ForwardPlans(self._analysis, True))
            )
            if asked is None:
                continue
            kept = Records.of(child)
            unlike = rewritten.has_new_gradients()
            if not (asked.demands or unlike or (kept is not None and kept.recomputes())):
                continue  # It reads no edited value.
            places = []
            for value in asked.demands:
                index = rewritten.exported.get(value)
                if index is None:
                    index = rewritten.exported[value] = len(rewritten.results)
                    rewritten.results.append(value)
                places.append(index)
            found[child] = places
        return found

    def _add_gap(self, what: str, why: str) -> None:
        self._gaps[what] = why


class _Definitions:
    """FunctionDefs by name, including those of forward functions that may be gone."""

    def __init__(self, saved: _SavedResults | None) -> None:
        self._kept: dict[str, Any] = {}
        while saved is not None:
            self._kept[saved.function] = saved.twin.definition
            saved = saved.earlier

    def knows(self, name: str) -> bool:
        """Return True if a function exists, and keep its definition in case another thread removes
        it.
        """
        try:
            self._kept[name] = self(name)
        except errors.NotFoundError:
            return False
        return True

    def __call__(self, name: str) -> Any:
        return self._kept.get(name) or context.context().get_function_def(name)


@contextmanager
def _quiet_graph() -> Iterator[None]:
    """Hide the driver's own work: run it eagerly, off the tape and without interception."""
    STATE.quiet += 1
    try:
        with ops.init_scope(), record.stop_recording():
            yield
    finally:
        STATE.quiet -= 1


class _Patches(Patches):
    """The functions of TensorFlow that are replaced while any thread is attached."""

    def install(self) -> None:
        for entry_point, make in (
            (CALL_FUNCTION, _calling),
            (SELECT_FUNCTIONS, _differentiating),
            (RECORD_OPERATION, _carrying),
            (RECORD_BACKPROP_ONLY, _carrying),
        ):
            self.replace(*entry_point, make(entry_point.current))


_PATCHES = _Patches()


def _calling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_function(self: Any, name: Any, tensor_inputs: Any, num_outputs: Any) -> Any:
        saved = STATE.passed_results
        mode = saved.mode if saved is not None else STATE.functions
        if STATE.quiet or mode is None:
            return original(self, name, tensor_inputs, num_outputs)
        function = name.decode()
        if function not in GRAPHS:
            # Traced before the recorder was installed; the caller is the AtomicFunction.
            graph = graph_of_function(local_of(sys._getframe(1), "self"))
            if graph is not None:
                GRAPHS[function] = graph

        def call(function: Any, inputs: Any, count: Any) -> Any:
            STATE.quiet += 1  # The eager mode would see the call as one more op.
            try:
                return original(self, function, inputs, count)
            finally:
                STATE.quiet -= 1

        return mode.run(call, name, tensor_inputs, num_outputs, saved)

    return call_function


def _differentiating(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def select(self: Any, *args: Any, **kwargs: Any) -> Any:
        records.drop_unrecorded_gradients(self)
        functions = original(self, *args, **kwargs)
        if context.executing_eagerly():
            STATE.tangents = bool(forwardprop_util.pack_tangents(args[0]).tangents)
        return functions

    return select


def _is_followed(function: str) -> bool:
    """Return True if a forward accumulator tracks the call of a function."""
    # For a call that is not differentiated, STATE.tangents still describes an earlier call.
    return STATE.tangents and function.startswith("__forward_")


def _carrying(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `record_operation` so that the tape's backward function receives the twin's extra
    outputs.
    """

    @functools.wraps(original)
    def record_operation(
        op_type: Any,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        made, STATE.saved_results = STATE.saved_results, None
        if made is not None and output_tensors and _same(made[0], output_tensors):
            saved, compute = made[1], backward_function

            def backward_function(*gradients: Any) -> Any:
                if not context.executing_eagerly():
                    saved.refuse_in_graph()
                # `apply` may have ended meanwhile; edits of the forward pass are still valid.
                if saved.mode.session.closed and saved.twin.watched:
                    saved.mode.session.warn_once(
                        "Backward ran after `apply` ended: edits made in the forward pass "
                        "stay, backward routines do not run. Call it inside `apply`."
                    )
                _PATCHES.acquire()
                before, STATE.passed_results = STATE.passed_results, saved
                try:
                    return compute(*gradients)
                finally:
                    STATE.passed_results = before
                    _PATCHES.release()

        return original(op_type, output_tensors, input_tensors, backward_function, *args, **kwargs)

    return record_operation


def _same(made: Sequence[Any], recorded: Sequence[Any]) -> bool:
    known = {id(tensor) for tensor in made}
    return any(id(tensor) in known for tensor in recorded)
