"""`MxnetAttachment`: attaches one session to MXNet.

Owns what is done at each call that `interception` passes on, and which calls are ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mxnet
from mxnet.ndarray import NDArray

from amanda_core.driver_kit import Session
from amanda_core.interface import CoverageGap
from amanda_driver_mxnet.execution.eager import Call, ImperativeProgram
from amanda_driver_mxnet.execution.hybrid import HybridPrograms
from amanda_driver_mxnet.facts import FACTS
from amanda_driver_mxnet.interception import ROUTES
from amanda_driver_mxnet.mxnet_internals.arrays import op_info
from amanda_driver_mxnet.mxnet_internals.graphs import graph_of
from amanda_driver_mxnet.vocabulary import DECLARATIONS

__all__ = ["MxnetAttachment"]

EAGER, HYBRID = (f"mxnet/{mxnet.__version__}/{mode}" for mode in ("eager", "hybrid"))


class MxnetAttachment:
    """Instruments the operators of one thread."""

    facts = FACTS

    def __init__(self, session: Session) -> None:
        self.session = session
        self._eager = ImperativeProgram(session, EAGER)
        self.enter_zone = self._eager.enter_zone
        self._hybrid = HybridPrograms(self._eager, HYBRID)
        #: What runs instead of the next program of a hybridized block.
        self._running: Callable[[Sequence[NDArray]], Any] | None = None
        session.at_close(self.detach)
        ROUTES.attach(self)

    def enter_thread(self) -> None:
        """Instrument the calling thread, after another one, which has ended."""
        ROUTES.move(self)

    def ask(self) -> None:
        """Do nothing: each operator of a thread without an attachment calls `join` anyway."""

    def detach(self) -> None:
        """Wait for MXNet's workers, and restore the functions that were found."""
        try:
            if self._eager.watched:
                mxnet.nd.waitall()
        finally:
            self._eager.watched = False
            ROUTES.detach(self)

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

        # Other arguments are named by their positions.
        attrs = {str(n): value for n, value in enumerate(args) if n not in places} | kwargs
        return self._eager.execute(Call(name, [args[place] for place in places], run, (), attrs))

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
        if not self.session.enabled or not any(isinstance(value, NDArray) for value in args):
            return original(block, *args, **kwargs)
        with self._eager.calling(block, args, kwargs):
            return original(block, *args, **kwargs)

    def call_hybridized(self, original: Callable[..., Any], block: Any, *args: Any) -> Any:
        """Run a hybridized block, whose program MXNet then calls on flat arguments."""
        if not self.session.enabled:
            return original(block, *args)
        scope = self._eager.scope or self._eager.scopes.enter(block, None, False)
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


ROUTES.attachment = MxnetAttachment
