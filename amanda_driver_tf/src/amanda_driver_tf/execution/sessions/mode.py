"""`GraphMode`: graphs that a `tf.compat.v1.Session` runs, instrumented at each run.

Owns when a run is translated, and what runs instead. `translations` has the hidden clones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.driver_kit import Patches, Session
from amanda_core.interface import CoverageGap, UnsupportedError
from amanda_driver_tf.execution.sessions.translations import (
    Asked,
    Translation,
    Translations,
    Translator,
)
from amanda_driver_tf.graphs.analysis import Analysis
from amanda_driver_tf.graphs.constants import SessionConstants
from amanda_driver_tf.identity.namespaces import GRAPH
from amanda_driver_tf.insertion.shape_checks import failed_check_error
from amanda_driver_tf.rewriting.mode import Mode
from amanda_driver_tf.tensorflow_internals.objects import extend_graph, operation_of
from amanda_driver_tf.threads import STATE, Request, quietly

__all__ = ["GraphMode"]

_BUILDING = threading.RLock()
# How many partial runs that are finished are remembered.
_FINISHED_KEPT = 64
_PARTIAL = "_amanda_partial_runs"


class GraphMode(Mode):
    """Instruments the sessions that one thread runs.

    Args:
        session: The session whose tools instrument them.
        patches: The functions of TensorFlow that pass runs on to it.
    """

    def __init__(self, session: Session, patches: Patches) -> None:
        super().__init__(session, patches, "graph")
        self._reader = SessionConstants()
        self._analysis = Analysis(session, GRAPH, self._reader)
        self._translations = session.persistent("tensorflow.translations", Translations)

    def start(self) -> None:
        """Start intercepting session runs in this thread."""
        super().start()
        self.enter_thread()

    def enter_thread(self) -> None:
        """Intercept session runs in this thread."""
        STATE.graphs = self

    def coverage(self) -> Sequence[CoverageGap]:
        """Return the gaps in the coverage of session runs."""
        return [
            CoverageGap(
                "partial runs that were set up before the tools were applied",
                "they run without tools, and are refused if a tool would edit something",
            ),
            CoverageGap(
                "gradients that nothing reads",
                "tf.gradients requests them, but TensorFlow's optimizer drops them, and routines "
                "would cause them to be computed",
            ),
            CoverageGap(
                "CallableOptions",
                "callables of Session._make_callable_from_options run without Python",
            ),
            CoverageGap(
                "edits of ops in loops of TensorFlow 1 that are differentiated, or whose gradient "
                "is computed in another loop or branch than the op",
                "they are refused; observers run there, and so do edits of gradients",
            ),
            CoverageGap(
                "control outputs of ops", "Operation._control_outputs includes hidden clones"
            ),
            *self.gaps(),
        ]

    def run(self, call: Callable[[Any, Any], Any], owner: Any, request: Request) -> Any:
        """Run a session.

        Args:
            call: Runs fetches and targets.
            owner: The session.
            request: The requested fetches, feeds and targets.
        """
        failures = self.session.failures
        try:
            translation = self._translation(owner, request)
        except Exception as error:
            if not failures.is_drivers(error):
                raise
            named = ", ".join(
                operation_of(owner.graph, output.oper).name for output in request.fetches[:3]
            )
            failures.note(error, "tensorflow", f"a run of a session for {named}")
            return call(request.fetches, request.targets)
        outputs, operations = translation.run(owner.graph, request)

        def run() -> Any:
            extend_graph(owner)
            return call(outputs, operations)

        return self._execute(run)

    def _execute(self, call: Callable[[], Any], ends_step: bool = True) -> Any:
        """Run something that contains routines, and raise their exceptions."""
        session = self.session
        self._listener.listen(session)
        running, quiet = STATE.running, STATE.quiet
        try:
            STATE.running, STATE.quiet = running + 1, quiet + 1
            result = call()
            STATE.running, STATE.quiet = running, quiet
        except BaseException as error:
            STATE.running, STATE.quiet = running, quiet
            session.raised(error)
            session.raise_pending()
            refused = failed_check_error(error)
            if refused is not None:
                raise refused from error
            raise
        session.raise_pending()
        if not running and ends_step:
            session.end_step()
        return result

    # Partial runs.

    def set_up(self, call: Callable[[Any, Any], Any], owner: Any, request: Request) -> Any:
        """Set up a partial run and return its handle.

        Args:
            call: Sets up a run of fetches and targets.
            owner: The session.
            request: What will be fed, what may be fetched, and which ops run besides.
        """
        translation = self._translation(owner, request)
        outputs, operations = translation.run(owner.graph, request)
        # Ops that do not depend on feeds start to run now.
        handle = self._execute(lambda: call(outputs, operations), ends_step=False)
        pending = getattr(owner, _PARTIAL, None)
        if pending is None:
            pending = {}
            setattr(owner, _PARTIAL, pending)
        instead = dict(zip(_keys(owner.graph, request.fetches), outputs, strict=True))
        pending[handle] = translation, instead, set(instead)
        return handle

    def run_partially(
        self, call: Callable[[Any], Any], owner: Any, handle: Any, request: Request
    ) -> Any:
        """Continue a partial run.

        Args:
            call: Continues it for fetches.
            owner: The session.
            handle: The partial run.
            request: The requested fetches and feeds.

        Raises:
            UnsupportedError: It was set up before the tools were applied, and a tool edits
                something.
        """
        _, instead, waiting = getattr(owner, _PARTIAL, {}).get(handle, (None, None, None))
        if instead is None or waiting is None:
            if self.session.enabled and self._translation(owner, request).is_edited:
                raise UnsupportedError(
                    "A partial run was set up before the tools were applied",
                    fix="Call Session.partial_run_setup inside amanda.apply, too",
                )
            return call(request.fetches)
        keys = _keys(owner.graph, request.fetches)
        outputs = [instead.get(key, old) for key, old in zip(keys, request.fetches, strict=True)]
        waiting.difference_update(keys)
        if not waiting:
            self._finished(getattr(owner, _PARTIAL), handle)
        return self._execute(lambda: call(outputs), not waiting)

    def _finished(self, pending: dict[Any, Any], handle: Any) -> None:
        """Mark a partial run as finished. TensorFlow raises if its handle is used again."""
        pending[handle] = None, {}, set()
        done = [each for each, (translation, _, _) in pending.items() if translation is None]
        for each in done[:-_FINISHED_KEPT]:
            del pending[each]

    # Translation.

    def _translation(self, owner: Any, request: Request) -> Translation:
        graph, session = owner.graph, self.session
        asked = Asked.of(graph, request)
        key = session.epoch, id(graph), asked.names
        if session.caching:
            known = self._translations.found.get(key)
            if known is not None:
                return known
        translator = Translator(session, self._analysis, self.add_gap, graph, asked)
        with _BUILDING, quietly():
            self._analysis.sweep()
            self._reader.bind(owner)
            try:
                found = translator.translate()
            except UnsupportedError as refused:
                # Routines that return None can still run, as observers.
                found = translator.translate(refused)
            finally:
                self._reader.bind(None)
                self._analysis.forget()
        if session.caching:
            self._translations.put(graph, key, found)
        return found


def _keys(graph: Any, outputs: Sequence[Any]) -> list[tuple[str, int]]:
    """Return the op name and index of each output of the C API."""
    return [(operation_of(graph, output.oper).name, output.index) for output in outputs]
