"""The attachment of one session to JAX: what happens at an operator, and around a jitted call."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend.core.primitives import jit_p

from amanda_core.driver_kit import (
    COMPILED_CALL,
    MODULE_INPUT,
    MODULE_OUTPUT,
    OpRecord,
    Session,
    Tool,
    replace_first,
)
from amanda_core.interface import CoverageGap
from amanda_driver_jax import jax_internals as internals
from amanda_driver_jax.arrays import on_devices
from amanda_driver_jax.execution import Execution, execute, op_type_of
from amanda_driver_jax.facts import FACTS
from amanda_driver_jax.identity.call_sites import OpTable, is_user_call
from amanda_driver_jax.identity.modules import Models
from amanda_driver_jax.identity.path_modules import ModulePlace
from amanda_driver_jax.identity.plain_trees import tree_of_call
from amanda_driver_jax.interception import PATCHES, plain_bind, plain_call
from amanda_driver_jax.jax_internals import JittedCall, MappedCall
from amanda_driver_jax.module_calls import module_input, module_output, show_modules
from amanda_driver_jax.routines import Host
from amanda_driver_jax.stacked_layers import MEMBERS
from amanda_driver_jax.trace_keys import (
    JITTED_CALL,
    LOCAL,
    PLAIN,
    Program,
    Traced,
    calls_around,
    restore,
    set_key,
)
from amanda_driver_jax.vocabulary import DECLARATIONS

#: How many programs of one operator are kept, for arguments of different shapes.
_PROGRAMS = 64


class _State:
    """The ops of each mode, the callbacks and the models; they resume with the contexts."""

    def __init__(self) -> None:
        self.eager = OpTable(f"jax/{jax.__version__}/eager")
        self.jit = OpTable(f"jax/{jax.__version__}/jit")
        self.host = Host()
        self.models = Models()


def _asked_of(tools: Sequence[Tool]) -> tuple[Sequence[Tool], bool, bool]:
    """Return tools, whether any wants operators to run one by one, and any calls to be shown."""
    return (
        tools,
        any(tool.uncompiled for tool in tools),
        any(tool.sees_compiled_calls for tool in tools),
    )


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
        #: What the tools ask of jitted calls.
        self._asked = _asked_of(())
        self._outer: JaxAttachment | None = LOCAL.hold
        self._attached, self._before = True, calls_around()
        session.at_close(self.detach)
        PATCHES.acquire(self)
        LOCAL.hold = self
        self.changed()

    def detach(self) -> None:
        """Wait for callbacks, and restore JAX's functions after the last session."""
        if not self._attached:
            return
        if self._state.host.is_used:
            jax.effects_barrier()
        self._state.eager.leave_calls()
        LOCAL.hold = self._outer
        PATCHES.release(self)
        # Also if an exception kept a call from restoring it.
        restore(self._before)
        if self._outer is not None:
            self._outer.changed()
        self._attached = False

    def changed(self) -> None:
        """Put the state of the session into the key of JAX's caches."""
        if LOCAL.hold is not self:
            return  # Another thread has changed the tools; the keys are those of a thread.
        session = self.session
        number = 0 if session.caching else next(self._executions)
        # A listener that changes tools is not instrumented itself, but what follows it is.
        enabled = session.control.enabled and not session.closed
        set_key(("amanda", session.epoch, number) if enabled else None)
        if session.watches_values:
            show_modules()

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what this driver does not instrument, and why."""
        return [*self.session.failures.coverage("jax"), *DECLARATIONS.gaps()]

    # Jitted functions.

    def call(self, call: JittedCall) -> Any:
        """Run an outermost jitted call. It is a step."""
        if self._asked[0] is not self.session.tools:
            self._asked = _asked_of(self.session.tools)
        _, uncompiled, sees_calls = self._asked
        if LOCAL.uncompiled or uncompiled:
            return self._run_uncompiled(call)
        self._state.models.arrays.passed(call, sys._getframe(1))
        if sees_calls:
            result = self._call_shown(call)
        else:
            with JITTED_CALL:
                result = plain_call(call)
        self.finish(result)
        self.session.end_step()
        return result

    def _call_shown(self, call: JittedCall) -> Any:
        """Run a jitted call as an operator, whose inputs are the function's."""
        place = ModulePlace("", getattr(call.function, "__name__", type(call.function).__name__))
        top = internals.is_top_level()
        op = self._state.eager.called(COMPILED_CALL, place, sys._getframe(1), top)
        given, trees = call.parsed()[1], []

        def run(*values: Any) -> tuple[Any, ...]:
            same = all(map(operator.is_, values, given))
            with Program(), JITTED_CALL:
                result = plain_call(call if same else call.replaced(values))
            leaves, tree = jax.tree.flatten(result)
            trees.append(tree)
            return tuple(leaves)

        with PLAIN:
            host, raw = self._state.host, call.function
            outputs = execute(self.session, host, raw, {}, op, given, run)
        return trees[-1].unflatten(outputs)

    def _run_uncompiled(self, call: JittedCall) -> Any:
        """Run a jitted function operator by operator; it is a step unless one around it is."""
        with PLAIN:
            given = [
                jnp.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else value
                for value in call.parsed()[1]
            ]
        call, before = call.replaced(given), LOCAL.uncompiled
        LOCAL.uncompiled = True
        try:
            result = call.function(*call.args, **call.kwargs)
        finally:
            LOCAL.uncompiled = before
        with PLAIN:
            result = jax.tree.map(jnp.asarray, result)
        if not before:
            self.finish(result)
            self.session.end_step()
        return result

    def traced(self, call: JittedCall, traced: Traced) -> None:
        """Note which arguments of a jitted function are parameters."""
        self._state.models.arrays.traced(call, traced)

    def exported(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Return a program with the staged edits, as `jax.export` makes it."""

        @functools.wraps(model, updated=())
        def function(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        # What was traced to run may call the host.
        set_key(("export", next(self._executions)))
        try:
            LOCAL.exports = True
            with JITTED_CALL:
                return export.export(jax.jit(function))(*args, **kwargs)
        finally:
            LOCAL.exports = False
            self.changed()

    def finish(self, result: Any) -> None:
        """Raise errors of the routines that a program has called, once it has run."""
        if self._state.host.is_used:
            with PLAIN:
                jax.block_until_ready(result)
                jax.effects_barrier()
        session = self.session
        if not session.caching:
            self.changed()
        if session.pending:
            session.raise_pending()

    def call_library(
        self, call: JittedCall, infer: Callable[..., tuple[Any, Any]], frame: FrameType
    ) -> Any:
        """Run an operator of JAX in C++, and return its result.

        Args:
            call: The call of the jitted function.
            infer: Returns the function's program and the values that this gets.
            frame: The frame that calls it.
        """
        op = self._called(call.function.__name__, frame, True)
        if op.is_idle(self.session) or not is_user_call(frame):
            with PLAIN:
                return plain_call(call)
        signature, given = call.parsed()
        key = signature, *map(internals.kind_of, given)
        kept: tuple[tuple[Any, Any], dict[Any, Any]] = op.kept or ((None, None), {})
        (last, program), programs = kept
        if key != last:  # To hash a type takes longer than to see that it is the same.
            program = programs.get(key)
            if program is None:
                if len(programs) == _PROGRAMS:
                    programs.clear()
                with PLAIN:
                    program = programs[key] = infer(*call)[0]
            op.kept = (key, program), programs

        def vanilla(*values: Any) -> tuple[Any, ...]:
            same = all(map(operator.is_, values, given))
            result = plain_call(call if same else call.replaced(values))
            return tuple(program.out_tree.flatten_up_to(result))

        host, params = self._state.host, program.params
        with PLAIN:
            outputs = execute(self.session, host, jit_p, params, op, given, vanilla)
        self.finish(outputs)
        return program.out_tree.unflatten(outputs)

    # Modules.

    def call_module(
        self,
        module: Any,
        bound: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Any:
        """Call a module, and show what it takes and returns.

        Args:
            module: The module.
            bound: Its method.
            args: The positional arguments.
            kwargs: The arguments by name.
            frame: The frame that calls it.
        """
        if not is_user_call(frame):
            return bound(*args, **kwargs)
        place = self._state.models.place(frame, module)
        args, kwargs = self._shown(module_input, MODULE_INPUT, place, (args, kwargs))
        return self._shown(module_output, MODULE_OUTPUT, place, bound(*args, **kwargs))

    def _shown(
        self, raw: Callable[..., Any], op_type: str, place: ModulePlace | None, value: Any
    ) -> Any:
        if place is None or not self.session.calls.shows(op_type, place.path):
            return value
        table = self._state.jit if internals.is_compiled() else self._state.eager
        top = internals.is_top_level()
        op = table.called(op_type, place, sys._getframe(1), top)

        def show(array: Any) -> Any:
            session, host = self.session, self._state.host
            if not top:
                return Execution(session, host, raw, {}, op, raw).run([array])[0]
            if op.is_idle(session):
                return array
            with PLAIN:
                outputs = execute(session, host, raw, {}, op, [array], raw)
            self.finish(outputs)
            return outputs[0]

        return replace_first(value, (jax.Array, np.ndarray), show)

    # Operators.

    def is_layered(self, stacked: Any, frame: FrameType) -> bool:
        """Return True if a program scans over parameters, and tools may edit them.

        Where none does, the scan stays: a loop may add gradients in another order.
        """
        leaves = jax.tree.leaves(stacked)
        sizes = {value.shape[:1] for value in leaves if hasattr(value, "shape")}
        if not self._may_edit() or len(sizes) != 1 or not (*sizes,)[0] or sizes == {(0,)}:
            return False
        return self._reads_any(frame, leaves)

    def is_ensemble(
        self, call: MappedCall, axes: Sequence[int | None], size: int, frame: FrameType
    ) -> bool:
        """Return True if a program maps a function over parameters, and tools may edit them."""
        if not self._may_edit() or not 0 < size <= MEMBERS or callable(axes):
            return False
        mapped = [v for v, axis in zip(call.values, axes, strict=True) if axis is not None]
        if self._reads_any(frame, mapped):
            return True
        # No function gets the parameters that the program maps itself.
        own = {id(value) for value in tree_of_call(call.function, call.args).values()}
        return any(id(value) in own and value.ndim > 2 for value in mapped)

    def _may_edit(self) -> bool:
        tools = self.session.tools
        return any(tool.changes_values is not False and tool.whole is not False for tool in tools)

    def _reads_any(self, frame: FrameType, values: Sequence[Any]) -> bool:
        # The loop tells its layers apart.
        before, LOCAL.loop = LOCAL.loop, LOCAL.loop or True
        try:
            return self._state.models.reads_any(frame, values)
        finally:
            LOCAL.loop = before

    def layer_of(self, values: Sequence[Any], frame: FrameType) -> str:
        """Return what tells a call of a jitted function from those with other parameters."""
        return self._state.models.layer_of(frame, values)

    def repeating(self, frame: FrameType) -> Callable[[], None]:
        """Return what is to be called before each call of a function that JAX calls once."""
        return self._state.models.repeating(frame)

    def _called(self, op_type: str, frame: FrameType, top: bool) -> OpRecord:
        state = self._state
        table = state.eager if top or not internals.is_compiled() else state.jit
        return table.called(op_type, state.models.place(frame), frame, top)

    def bind(self, primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run an operator, or what holds other operators."""
        frame = sys._getframe(2)
        if not is_user_call(frame):
            return plain_bind(primitive, *values, **params)
        op_type = op_type_of(primitive, params)
        top = internals.is_top_level()
        if op_type is None:
            if primitive is internals.SHARD_MAP:
                params = on_devices(values, params)
            result = plain_bind(primitive, *values, **params)
            if top:
                self.finish(result)
            return result
        op, session, host = self._called(op_type, frame, top), self.session, self._state.host
        if top:
            with PLAIN:  # No operator in here is instrumented.
                if op.is_idle(session):
                    return plain_bind(primitive, *values, **params)
                outputs = execute(session, host, primitive, params, op, values)
            if host.is_used or session.pending or not session.caching:
                self.finish(outputs)
        else:
            outputs = Execution(session, host, primitive, params, op).run(values)
        return outputs if primitive.multiple_results else outputs[0]
