"""The attachment of one session to JAX: what happens at an operator, and around a jitted call."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from amanda_core import CoverageGap, Session
from amanda_driver_jax._call_sites import Op, OpTable, Place, is_traced, is_user_call
from amanda_driver_jax._execution import Execution, op_type_of
from amanda_driver_jax._interception import PATCHES, plain_bind, plain_call
from amanda_driver_jax._jax_internals import is_top_level
from amanda_driver_jax._modules import Models
from amanda_driver_jax._routines import Host
from amanda_driver_jax._trace_keys import JITTED_CALL, LOCAL, plain, set_key
from amanda_driver_jax.facts import FACTS

#: What is not instrumented, and why.
_COVERAGE = {
    "functions compiled ahead of time before apply": "they are executables already",
    "functions of JAX that are lowered ahead of time by themselves (jnp.sin.lower)": (
        "what is inside an operator is not instrumented"
    ),
    "operators inside a program's own callbacks": "JAX runs them on other threads",
    "functions that are passed to an operator of JAX (jnp.apply_along_axis, lax.reduce)": (
        "they are a part of the operator"
    ),
    "routines in functions that JAX transposes (lax.custom_root), on the host in exported ones": (
        "JAX can do neither, and raises an error"
    ),
    "forward-mode derivatives of an op whose gradients are edited": (
        "there is no backward program; the run is refused"
    ),
    "which gradients of a watched op the program needs": (
        "those of all its inputs are computed, and shown to tools"
    ),
    "the layers of a loop outside of transformations and modules": (
        "arrays have no identity: the loop is one op that is executed several times"
    ),
}


class _State:
    """The ops of each mode, the callbacks and the models; they resume with the contexts."""

    def __init__(self) -> None:
        self.eager = OpTable(f"jax/{jax.__version__}/eager")
        self.jit = OpTable(f"jax/{jax.__version__}/jit")
        self.host = Host()
        self.models = Models()


class JaxAttachment:
    """The interception of JAX for one session, in the thread that makes it."""

    facts = FACTS
    #: Numbers for executions while caching is off: each is traced and analysed again.
    _executions = itertools.count(1)

    def __init__(self, session: Session) -> None:
        self.session = session
        self._state = session.persistent("jax", _State)
        self._state.host.session = session
        session.persistent("jax.parameters", lambda: self._state.models)
        #: The op that the Python path of a jitted function has found for `bind`.
        self._located: Op | None = None
        PATCHES.acquire()
        self._outer: JaxAttachment | None = LOCAL.hold
        LOCAL.hold = self
        self.changed()

    def detach(self) -> None:
        """Wait for callbacks, and restore JAX's functions after the last session."""
        if self._state.host.is_used:
            jax.effects_barrier()
        LOCAL.hold = self._outer
        PATCHES.release()
        set_key(None)
        if self._outer is not None:
            self._outer.changed()

    def changed(self) -> None:
        """Put the state of the session into the key of JAX's caches."""
        session = self.session
        number = 0 if session.caching else next(self._executions)
        set_key(("amanda", session.epoch, number) if session.enabled else None)

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what this driver does not instrument, and why."""
        gaps = [CoverageGap(what, why) for what, why in _COVERAGE.items()]
        return [*self.session.failures.coverage("jax"), *gaps]

    # Jitted functions.

    def call(self, function: Callable[..., Any], info: Any, args: Any, kwargs: Any) -> Any:
        """Run an outermost jitted call. It is a step."""
        self.changed()  # A listener may have begun an epoch, and it is not enabled inside one.
        with JITTED_CALL:
            result = plain_call(function, info, args, kwargs)
        self.finish(result)
        self.session.end_step()
        return result

    def finish(self, result: Any) -> None:
        """Raise errors of the routines that a program has called, once it has run."""
        if self._state.host.is_used:
            with plain():
                jax.block_until_ready(result)
                jax.effects_barrier()
        if not self.session.caching:
            self.changed()
        if self.session.pending:
            self.session.raise_pending()

    def is_idle(self, op_type: str) -> bool:
        """Return True if no tool has an action at the operator of JAX that is being called."""
        op = self._located = self._state.eager.locate(op_type, self._module())
        return op.idle == self.session.epoch and self.session.caching

    def run_idle(self, function: Callable[..., Any], info: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of JAX at which no tool has an action."""
        self._located = None
        with plain():
            return plain_call(function, info, args, kwargs)

    # Operators.

    def _module(self) -> Place | None:
        return self._state.models.place(sys._getframe(2))

    def bind(self, primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run an operator, or what holds other operators."""
        located, self._located = self._located, None
        if not is_user_call(sys._getframe(2)):
            return plain_bind(primitive, *values, **params)
        op_type = op_type_of(primitive, params)
        top = is_top_level()
        if op_type is None:
            result = plain_bind(primitive, *values, **params)
            if top:
                self.finish(result)
            return result
        table = self._state.jit if is_traced() else self._state.eager
        op = located or table.locate(op_type, self._module())
        session = self.session
        if top and op.idle == session.epoch and session.caching:
            with plain():
                return plain_bind(primitive, *values, **params)
        execution = Execution(session, self._state.host, primitive, params, op)
        outputs = execution.run(values)
        if top:
            self.finish(outputs)
            if session.caching and not execution.has_plan:
                op.idle = session.epoch
        return outputs if primitive.multiple_results else outputs[0]
