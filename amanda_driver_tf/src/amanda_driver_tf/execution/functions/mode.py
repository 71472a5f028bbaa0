"""`FunctionMode`: functions that TensorFlow executes, instrumented as they are called.

Owns the decision when a function gets a twin, and how values of a forward function reach the
gradient function that a tape calls later. `interception.function_calls` passes the calls on, and
`function_rewriting` builds the twins.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from amanda_core.driver_kit import Patches, Session
from amanda_core.interface import CoverageGap, UnsupportedError
from amanda_driver_tf.execution.functions.exported_function import ExportedPlans, exported_function
from amanda_driver_tf.execution.functions.saved_results import (
    ForwardPlans,
    SavedPlans,
    SavedResults,
)
from amanda_driver_tf.execution.functions.twins import UNKNOWN, Gradients, Twin, Twins, remove
from amanda_driver_tf.execution.functions.vectorised_gradients import embeddable, original_input
from amanda_driver_tf.graphs.analysis import Analysis
from amanda_driver_tf.graphs.constants import Constants
from amanda_driver_tf.graphs.function_graphs import GRAPHS, children_of, name_of
from amanda_driver_tf.graphs.records import Records
from amanda_driver_tf.identity.namespaces import FUNCTION
from amanda_driver_tf.insertion.marks import OP_TYPE
from amanda_driver_tf.insertion.shape_checks import failed_check_error
from amanda_driver_tf.rewriting.function_rewriting import (
    Call,
    FunctionRewriter,
    with_names_of_program,
)
from amanda_driver_tf.rewriting.mode import Mode
from amanda_driver_tf.rewriting.rewritten_function import RewrittenFunction
from amanda_driver_tf.tensorflow_internals.modules import context, dtypes, errors, ops, record
from amanda_driver_tf.tensorflow_internals.objects import set_message
from amanda_driver_tf.threads import STATE, quietly

__all__ = ["FunctionMode"]

# Two threads must not rewrite at the same time, since they may read and change the same graphs.
_BUILDING = threading.RLock()


_NOT_SPREAD = re.compile(rf"'tf\.(EagerPyFunc|{OP_TYPE})' op does not implement layout propagation")


def _spread(error: BaseException) -> UnsupportedError | None:
    """Return the refusal of a host routine in a DTensor function, if `error` was raised by one."""
    if not _NOT_SPREAD.search(str(error)):
        return None
    return UnsupportedError(
        "A host routine was inserted into a function that runs on DTensors",
        fix="Mark the routine with @amanda.staged",
    )


class FunctionMode(Mode):
    """Instruments the functions that one thread calls.

    Args:
        session: The session whose tools instrument them.
        patches: The functions of TensorFlow that pass calls on to it.
    """

    def __init__(self, session: Session, patches: Patches) -> None:
        super().__init__(session, patches, "function")
        self._constants = Constants()
        self._analysis = Analysis(session, FUNCTION, self._constants)
        self._twins = session.persistent("tensorflow.twins", Twins)

    def start(self) -> None:
        """Start intercepting calls in this thread."""
        super().start()
        self.enter_thread()

    def enter_thread(self) -> None:
        """Intercept calls in this thread."""
        STATE.functions = self

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
            *self.gaps(),
        ]

    # Calls.

    def run(
        self,
        call: Callable[..., Any],
        name: bytes,
        inputs: list[Any],
        count: int,
        saved: SavedResults | None,
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
        running = STATE.running
        outermost = running == 0 and "__forward_" not in function
        outermost = outermost and "__backward_" not in function
        waits = twin is not None and context.is_async()
        self._listener.listen(session)
        try:
            STATE.running = running + 1
            if twin is None:
                outputs = call(name, inputs, count)
            else:
                outputs = self._run_twin(call, function, twin, inputs, count, saved, waits)
            STATE.running = running
        except BaseException as error:
            STATE.running = running
            self._raise_own(error, waits)
            raise
        session.raise_pending()
        if outermost and session.enabled:
            session.end_step()
        return outputs

    def embed(
        self,
        call: Callable[..., Any],
        atomic: Any,
        inputs: list[Any],
        saved: SavedResults,
    ) -> Any:
        """Let a graph that is being built call a gradient function or its twin.

        Args:
            call: Adds the call of a function to the graph, given its inputs.
            atomic: The gradient function.
            inputs: Its inputs.
            saved: The saved results of its forward function.
        """
        function = atomic.name.decode()
        if not saved.is_needed() or "__backward_" not in function:
            return call(atomic, inputs)
        known = GRAPHS.get(function) in saved.twin.gradients
        twin = self._twin(function, [*map(original_input, inputs)], saved if known else None)
        if twin is None:
            return call(atomic, inputs)
        count = len(atomic.function_type.flat_outputs)
        if twin.takes:
            chosen = saved.twin.gradients[GRAPHS[function]]
            inputs = [*inputs, *(saved.tensors[index] for index in chosen)]
        return call(embeddable(twin, inputs), inputs)[:count]

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
        saved: SavedResults | None,
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
        STATE.saved_results = (made, SavedResults(self, function, twin, list(extra), saved))
        return made or None

    # Twins.

    def _twin(
        self, function: str, inputs: Sequence[Any], saved: SavedResults | None
    ) -> Twin | None:
        session = self.session
        silent = not session.enabled
        forward = (saved.twin.number, saved.twin.has_edited()) if saved is not None else ()
        key = (session.epoch, silent, forward)
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

    def exported(
        self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return a model with the staged edits of the tools as a concrete function."""

        def rewrite(function: str, inputs: Sequence[Any]) -> Twin | None:
            with _BUILDING, _quiet_graph():
                return self._build(function, inputs, None, silent=False, exports=True)

        return exported_function(model, args, kwargs, rewrite)

    def _build(
        self,
        function: str,
        inputs: Sequence[Any],
        saved: SavedResults | None,
        silent: bool,
        refused: UnsupportedError | None = None,
        exports: bool = False,
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
        rewriter = FunctionRewriter(self.session, self._analysis, definitions, self.add_gap)
        try:
            forward = None
            if refused is not None and saved is not None and not saved.twin.has_edited():
                saved = None  # The values that it would need are the original ones.
            if saved is not None:
                forward = self._forward(rewriter, saved)
            rewriter.refused = refused
            bare: Analysis | None = ForwardPlans(self._analysis, False) if silent else None
            bare = ExportedPlans(self._analysis) if exports else bare
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
                saved.refuse_missing(function, len(rewritten.demands))
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

    def _forward(self, rewriter: FunctionRewriter, saved: SavedResults) -> RewrittenFunction | None:
        """Rewrite the forward function again as it was for the twin that saved the results."""
        earlier = self._forward(rewriter, saved.earlier) if saved.earlier else None
        kept = SavedPlans(self._analysis, saved.twin.plans)
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
                gradient, Call(forward=rewritten, analysis=ForwardPlans(self._analysis, True))
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


class _Definitions:
    """FunctionDefs by name, including those of forward functions that may be gone."""

    def __init__(self, saved: SavedResults | None) -> None:
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
    with quietly(), ops.init_scope(), record.stop_recording():
        yield


def _is_followed(function: str) -> bool:
    """Return True if a forward accumulator tracks the call of a function."""
    # For a call that is not differentiated, STATE.tangents still describes an earlier call.
    return STATE.tangents and function.startswith("__forward_")
