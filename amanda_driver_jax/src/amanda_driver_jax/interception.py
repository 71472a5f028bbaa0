"""Interception: what replaces `Primitive.bind` and the Python path of jitted functions.

C++ runs a jitted function without Python once it has got a compiled program for the current key.
Functions of JAX itself, such as `jnp.add`, are operators: the driver never hands their programs to
C++ while tools are applied. A user's outermost jitted call comes by here, and then runs in C++
under another key.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from jax import export, stages
from jax.extend.core import Primitive

from amanda_core.driver_kit import (
    Known,
    ModelWriters,
    Patches,
    is_started_by_python,
    join,
    replacing,
)
from amanda_driver_jax import jax_internals as internals
from amanda_driver_jax.identity.call_sites import is_library_code
from amanda_driver_jax.jax_internals import JittedCall
from amanda_driver_jax.stacked_layers import run_layers, run_members
from amanda_driver_jax.trace_keys import (
    LOCAL,
    PLAIN,
    Traced,
    hide_other_threads,
    show_other_threads,
)

#: Second callables of jitted functions, which share their compiled programs.
_callable_of = functools.lru_cache(256)(internals.jitted)


class _Interception(Patches):
    def install(self) -> None:
        self.infer, self.run = getattr(*internals.INFER), getattr(*internals.RUN)
        self.replace(Primitive, "bind", _bind)
        self.replace(*internals.INFER, _infer)
        self.replace(*internals.RUN, _run)
        self.checkpoint: Any = getattr(*internals.CHECKPOINT)
        self.replace(*internals.CHECKPOINT, _trace_checkpoint)
        for owner, name in internals.COMBINING:
            self.replace(owner, name, _uninstrumented(getattr(owner, name)))
        self.afterwards(_callable_of.cache_clear)
        self.batch: Any = getattr(*internals.BATCH)
        self.replace(*internals.BATCH, _batch)
        self.scan = internals.SCAN.cell_contents
        self.afterwards(self._restore_scan)
        internals.SCAN.cell_contents = _scan
        self.replace(stages.Traced, "__init__", _noting_key(stages.Traced.__init__))
        self.replace(stages.Traced, "lower", _passing_key_on(stages.Traced.lower))
        self.replace(stages.Lowered, "compile", _passing_key_on(stages.Lowered.compile))
        self.replace(stages.Compiled, "__call__", _noted_call(stages.Compiled.__call__))
        self.replace(export.Exported, "call", _noted_export(export.Exported.call))
        _WRITING.replace(self)
        self.afterwards(hide_other_threads)
        show_other_threads()

    def _restore_scan(self) -> None:
        internals.SCAN.cell_contents = self.scan


PATCHES = _Interception()
#: Runs an operator as JAX does, given it, its values and its parameters.
plain_bind: Callable[..., Any] = Primitive.bind


def plain_call(call: JittedCall) -> Any:
    """Call a jitted function through C++, under the current key."""
    return _callable_of(call.function, call.info)(*call.args, **call.kwargs)


def current_hold() -> Any:
    """Return the attachment of this thread; None if no operator is instrumented now."""
    hold = LOCAL.hold
    return None if hold is None or LOCAL.plain or not hold.session.enabled else hold


def _note_thread(op: str) -> None:
    """Let results say that this thread was not seen, if it has no tools."""
    if LOCAL.hold is None and is_started_by_python():
        join("jax", op)


def _bind(primitive: Any, *values: Any, **params: Any) -> Any:
    hold = LOCAL.hold  # As in `current_hold`, with one call less.
    if hold is None or LOCAL.plain or not hold.session.enabled:
        _note_thread(primitive.name)
        return plain_bind(primitive, *values, **params)
    return hold.bind(primitive, values, params)


def _quietly_called(original: Callable[..., Any], writer: str) -> Callable[..., Any]:
    """Return a function that works on the program as it is without tools."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        hold = current_hold()
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if hold is not None and writer and not caller.startswith(internals.NO_WRITERS):
            hold.session.warn_of_writer(writer)
        with PLAIN:
            return original(*args, **kwargs)

    return call


_WRITING = ModelWriters(internals.QUIET_FUNCTIONS, internals.WRITERS, _quietly_called)


def _uninstrumented(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that traces a part of an operator, which may not call the host."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with PLAIN:
            return trace(*args, **kwargs)

    return run


def _scan(
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
) -> Any:
    hold = current_hold()
    if hold is None or not hold.is_layered(xs, sys._getframe(1)):
        return PATCHES.scan(f, init, xs, length, reverse, unroll, _split_transpose)
    return run_layers(f, init, xs, reverse, hold.repeating(sys._getframe(1)))


class _Mapping(NamedTuple):
    """The function that `jax.vmap` calls instead of one that is mapped over parameters.

    A member is one index of the mapped axis, such as one model of an ensemble.

    Attributes:
        members: Called with a function and the values of all members. It calls the function for
            each member, and returns what `run_members` does.
        function: The function that is mapped, as JAX wraps it.
    """

    members: Callable[..., Any]
    function: Any

    def call_wrapped(self, *values: Any) -> Any:
        """Call `function` once for each member, and stack the results.

        Args:
            *values: The flat arguments of the call of `jax.vmap`, not yet split along their mapped
                axes.

        Returns:
            The flat results, each stacked along its output axis, and these axes. The axis is None
            for a result that is not mapped, which is the one of the first member.
        """
        return self.members(self._called, values)

    def _called(self, *values: Any) -> Sequence[Any]:
        for store in self.function.stores:
            if store:  # The tree of its results, which each call finds.
                store.reset()
        found: Sequence[Any] = self.function.call_wrapped(*values)
        return found


def _batch(function: Any, axis: Any, axes: Any, results: Any, sum_match: bool = False) -> Any:
    hold, caller = current_hold(), sys._getframe(1)
    call = None if hold is None or sum_match else internals.mapped_call(caller, axis)
    if hold is None or call is None or not hold.is_ensemble(call, axes, axis.size, caller):
        return PATCHES.batch(function, axis, axes, results, sum_match)
    count, repeat = axis.size, hold.repeating(caller)

    def members(called: Callable[..., Any], values: Sequence[Any]) -> Any:
        return run_members(called, values, axes, results, count, repeat)

    return _Mapping(members, function)


#: Stage of a compilation that was traced with tools -> their key.
_KEYS: Known[Hashable] = Known()


@replacing
def _noting_key(original: Callable[..., None], stage: Any, *args: Any, **kwargs: Any) -> None:
    original(stage, *args, **kwargs)
    if current_hold() is not None:
        _KEYS.set(stage, LOCAL.key)


@replacing
def _passing_key_on(original: Callable[..., Any], stage: Any, *args: Any, **kwargs: Any) -> Any:
    found = original(stage, *args, **kwargs)
    if (key := _KEYS.get(stage)) is not None:
        _KEYS.set(found, key)
    return found


def _noted_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of executables, so that results say which ones have other tools, or none."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        hold = current_hold()
        if hold is not None and _KEYS.get(self) != LOCAL.key:
            hold.session.note_call(*_COMPILED)
        result = original(self, *args, **kwargs)
        if hold is not None:
            hold.finish(result)
        return result

    return call


@replacing
def _noted_export(original: Callable[..., Any], exported: Any, *args: Any, **kwargs: Any) -> Any:
    hold = current_hold()
    if hold is not None:
        hold.session.note_inside(f"jax.export's {exported.fun_name!r}", "an exported program")
    return original(exported, *args, **kwargs)


#: What results say of an executable, and why it is not seen.
_COMPILED = "jax.stages.Compiled", "in programs that were compiled before: call the jitted function"


#: Stands for the program of a call that the driver has already executed, beside its result.
_DONE = object()
#: What JAX reads of a program, of which C++ is to keep nothing.
_NO_PROGRAM = SimpleNamespace(effects=frozenset(), consts=())


def _infer(*parts: Any) -> tuple[Any, Any]:
    hold, call, caller = current_hold(), JittedCall(*parts), sys._getframe(1)
    called = internals.is_top_level() and internals.is_call(caller.f_code.co_name)
    if hold is None:
        _note_thread(getattr(parts[0], "__name__", "jit"))
        # If a listener calls it, C++ must not keep it under the key of instrumented calls.
        listening = called and LOCAL.key is not None and not LOCAL.plain
        with PLAIN:
            if listening:
                return _DONE, plain_call(call)
            return PATCHES.infer(*parts)  # type: ignore[no-any-return]
    if not called and not LOCAL.exports and internals.is_export(caller):
        hold.session.warn_of_writer("jax.export")
        with PLAIN:
            return PATCHES.infer(*call)  # type: ignore[no-any-return]
    if _is_library(call.function):
        if called:
            return _DONE, hold.call_library(call, PATCHES.infer, caller)
        with PLAIN:  # What an operator of JAX calls is not traced for tools.
            return PATCHES.infer(*call)  # type: ignore[no-any-return]
    if called and LOCAL.jitted is None:
        return _DONE, hold.call(call)
    return trace_arguments(call)


def trace_arguments(call: JittedCall) -> tuple[Any, Any]:
    """Trace a jitted function, and return its program and the values that this gets.

    During the trace, `arrays.argument` knows the arguments of the function.
    """
    hold, values = LOCAL.hold, call.parsed()[1]
    in_place = any(traced.inside is None for traced in LOCAL.arguments)
    layer = ""
    # Where it is executed, calls with other parameters may be those of a later step of training.
    if hold is not None and not in_place and not internals.is_top_level():
        layer = hold.layer_of(values, sys._getframe(1))
    traced = Traced(internals.current_trace(), values, in_place, layer)
    with traced:
        found: tuple[Any, Any] = PATCHES.infer(*call)
    if hold is not None and not traced.in_place:
        hold.traced(call, traced)
    return found


def _trace_checkpoint(*parts: Any) -> Any:
    """Trace a function that is computed again in the backward pass, each time that it is called.

    JAX would keep what it has traced, but each layer that calls the function has ops of its own.
    """
    if current_hold() is None:
        return PATCHES.checkpoint(*parts)
    with Traced(internals.current_trace(), internals.checkpointed(sys._getframe(1)), True):
        return PATCHES.checkpoint(*parts)


def _run(p: Any, values: Any, *others: Any) -> tuple[Any, ...]:
    """Stand in the place of `_run_python_pjit`. Without a program C++ asks again at each call."""
    if p is _DONE:
        return (values, (), None, (), _NO_PROGRAM, None, None, ())
    if LOCAL.hold is None:
        with PLAIN:
            return PATCHES.run(p, values, *others)  # type: ignore[no-any-return]
    return PATCHES.run(p, values, *others)  # type: ignore[no-any-return]


def _is_library(function: Any) -> bool:
    """Return True for an operator of JAX: `jax.jit(jax.vmap(jax.grad(f)))` is the user's."""
    while function is not None:
        # What JAX has jitted and the user transforms or jits again has no code.
        if not is_library_code(getattr(function, "__code__", None)):
            return False
        function = getattr(function, "__wrapped__", None)
    return True
