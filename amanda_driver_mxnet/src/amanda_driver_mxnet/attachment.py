"""`MxnetAttachment`: attaches one session to MXNet.

Owns the replacements of MXNet's functions, and which calls are ops. Operators are called through
`_imperative_invoke`; methods that make views, and a few functions, call the C library themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mxnet
from mxnet.ndarray import NDArray

from amanda_core import CoverageGap, Session
from amanda_core.patching import Patches
from amanda_core.scopes import Activation
from amanda_driver_mxnet._mxnet_internals.arrays import ENTRY_POINTS, op_info
from amanda_driver_mxnet._mxnet_internals.graphs import graph_of
from amanda_driver_mxnet.eager import Call, EagerProgram
from amanda_driver_mxnet.facts import FACTS
from amanda_driver_mxnet.hybrid import HybridPrograms
from amanda_driver_mxnet.vocabulary import DECLARATIONS

__all__ = ["MxnetAttachment"]

EAGER, HYBRID = (f"mxnet/{mxnet.__version__}/{mode}" for mode in ("eager", "hybrid"))
#: Thread -> its attachment. Tools act in the thread that applied them.
_ATTACHED: dict[int, MxnetAttachment] = {}


class _Interception(Patches):
    """Replacements of MXNet's functions, which call the attachment of the thread if it has one."""

    def install(self) -> None:
        for name, (owner, attribute) in ENTRY_POINTS.items():
            self.replace(owner, attribute, self._replacement(name, getattr(owner, attribute)))

    @staticmethod
    def _replacement(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        method = getattr(MxnetAttachment, name, None)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            attachment = _ATTACHED.get(threading.get_ident())
            if attachment is None:
                return original(*args, **kwargs)
            if method is not None:
                return method(attachment, original, *args, **kwargs)
            return attachment.function(name, original, *args, **kwargs)

        return replacement


_INTERCEPTION = _Interception()


class MxnetAttachment:
    """Instruments the operators of one thread."""

    facts = FACTS

    def __init__(self, session: Session) -> None:
        self.session = session
        self.thread = threading.get_ident()
        self._eager = EagerProgram(session, EAGER)
        self._hybrid = HybridPrograms(self._eager, HYBRID)
        #: What runs instead of the next program of a hybridized block.
        self._running: Callable[[Sequence[NDArray]], Any] | None = None
        _INTERCEPTION.acquire()
        _ATTACHED[self.thread] = self

    def detach(self) -> None:
        """Wait for MXNet's workers, and restore the functions that were found."""
        if _ATTACHED.pop(self.thread, None) is not None:
            try:
                if self._eager.watched:
                    mxnet.nd.waitall()
            finally:
                _INTERCEPTION.release()

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what is not instrumented, and why."""
        return DECLARATIONS.gaps()

    # Replacements of MXNet's functions.

    def invoke(
        self,
        original: Callable[..., Any],
        handle: int,
        arrays: Sequence[NDArray],
        keys: Sequence[str],
        values: Sequence[Any],
        out: Any,
        *rest: Any,
    ) -> Any:
        """Execute an operator that a generated function calls."""
        if not self.session.enabled:
            return original(handle, arrays, keys, values, out, *rest)
        info = op_info(handle)
        return self._eager.execute(
            Call(
                info.name,
                arrays,
                lambda new: original(handle, new, keys, values, out, *rest),
                info.inputs,
                dict(zip(keys, values, strict=True)),
                out,
            )
        )

    def function(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Execute a method or function that is an operator and calls the C library itself."""
        if not self.session.enabled:
            return original(*args, **kwargs)
        places = [place for place, value in enumerate(args) if isinstance(value, NDArray)]

        def run(new: Sequence[NDArray]) -> Any:
            values = list(args)
            for place, value in zip(places, new, strict=True):
                values[place] = value
            return original(*values, **kwargs)

        return self._eager.execute(Call(name, [args[place] for place in places], run, (), kwargs))

    def backward(self, original: Callable[..., Any], *args: Any) -> Any:
        """Run a backward program, and raise what routines raised in it."""
        status = original(*args)
        if self._eager.watched and status == 0:
            # Routines run on MXNet's threads, and the program goes on only after them.
            self._eager.watched = False
            mxnet.nd.waitall()
            self.session.raise_pending()
        return status

    def call(self, original: Callable[..., Any], block: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a block, whose path its operators have."""
        session, eager = self.session, self._eager
        if not session.enabled or not any(isinstance(value, NDArray) for value in args):
            return original(block, *args, **kwargs)
        parent = eager.activations[-1].scope if eager.activations else None
        scope = eager.scopes.enter(block, parent, False)
        if parent is None and session.watches_calls:
            session.calls.enter(EAGER, scope.root, args, kwargs)
        if session.watches_scopes:
            session.enter_scope(scope.path or scope.root)
        eager.activations.append(Activation(scope))
        try:
            return original(block, *args, **kwargs)
        finally:
            eager.activations.pop()
            if session.watches_scopes:
                session.leave_scope(scope.path or scope.root)
            if parent is None and session.watches_calls:
                session.calls.leave()

    def call_hybridized(self, original: Callable[..., Any], block: Any, *args: Any) -> Any:
        """Run a hybridized block, whose program MXNet then calls on flat arguments."""
        if not self.session.enabled:
            return original(block, *args)
        activations = self._eager.activations
        parent = activations[-1].scope if activations else None
        scope = self._eager.scopes.enter(block, parent, False) if parent is None else parent
        graph = graph_of(block, args)
        if not self._hybrid.is_idle(graph, scope):
            self._running = partial(self._hybrid.run, graph, block, scope)
        return original(block, *args)

    def run_graph(self, original: Callable[..., Any], program: Any, *args: Any, **kw: Any) -> Any:
        """Run the program of a hybridized block, or its operators one by one."""
        run, self._running = self._running, None
        return original(program, *args, **kw) if run is None else run(args)

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Update parameters, which ends a step."""
        result = original(*args, **kwargs)
        self.session.end_step()
        return result

    update = step
