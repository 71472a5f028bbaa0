"""The state of a thread, and the part of it that is in the keys of JAX's caches.

The key is part of everything that JAX traces or compiles, so that the program of a tool and the
plain one are kept side by side. JAX compiles again what was compiled before the key was added, so
this module is imported with JAX.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from amanda_driver_jax import jax_internals as internals

_KEY: Any = jax.make_user_context(None)
#: Sets the key of this thread. `_UNSET` lets it have the key of all threads.
_set, _UNSET = internals.setter_of(_KEY)
_TOOLS = itertools.count(1)


class Traced:
    """A call of a function that JAX traces inside ``with``.

    A function that is called in another one is traced at each call instead of once, so that each
    call has ops of its own.

    Attributes:
        around: The transformation (JAX's trace) around the call.
        values: The flat arguments of the call.
        in_place: Whether the function is traced at each call.
        layer: A label of the parameters among `values`, such as ``Model:layers.0``. It is a part of
            the cache key, so that calls with other parameters are traced apart. Empty if no
            argument is a parameter, or calls need not be told apart.
        inside: What the function gets for each of `values`, if that is known: None for an argument
            of which it gets a part. Else its trace is the one that is directly inside `around`.
        parameters: Index in `values` of an argument that is a parameter -> a weak reference to its
            `CurrentArray`.
    """

    _calls = itertools.count(1)

    def __init__(
        self,
        around: Any,
        values: Sequence[Any],
        in_place: bool,
        layer: str = "",
        inside: Sequence[Any] | None = None,
    ) -> None:
        self.around, self.values, self.in_place, self.layer = around, values, in_place, layer
        self.inside = inside
        self.parameters: dict[int, Any] = {}
        self._before = LOCAL.call
        # The function of a `shard_map` is called once for a trace, so no key tells its calls apart.
        self._call = next(self._calls) if in_place and inside is None else layer

    def __enter__(self) -> None:
        LOCAL.arguments = (*LOCAL.arguments, self)
        if self._call:
            LOCAL.call = self._call
            _refresh()

    def __exit__(self, *_: object) -> None:
        LOCAL.arguments = LOCAL.arguments[:-1]
        if self._call:
            LOCAL.call = self._before
            _refresh()


class _Local(threading.local):
    """The driver's state of one thread.

    Attributes:
        hold: The attachment of the thread's session.
        key: The key of the session's state; None if nothing is instrumented.
        jitted: The key inside a jitted call; None outside of jitted calls.
        current: The key that is used where operators are instrumented.
        plain: Depth of code in which no operator is instrumented.
        trace: The transformation in which an operator is analysed; None outside of such analysis.
        uncompiled: Whether a jitted function runs operator by operator.
        exports: Whether a program is traced that runs without Amanda.
        call: The number of the call that is being traced in place, or its `Traced.layer`; 0
            outside of such calls.
        loop: The loop over layers that runs.
        module: The module whose call is shown.
        arguments: The calls of functions that are being traced, outermost first.
    """

    hold: Any = None
    key: Hashable = None
    jitted: Hashable = None
    current: Any = _UNSET
    plain = 0
    trace: Any = None
    uncompiled = False
    exports = False
    call: int | str = 0
    loop: Any = None
    module: Any = None
    arguments: tuple[Traced, ...] = ()


LOCAL = _Local()


def set_key(key: Hashable) -> None:
    """Set the key of the session's state for this thread."""
    LOCAL.key = key
    _refresh()


def calls_around() -> tuple[Any, ...]:
    """Return the calls that this thread is inside of, for `restore`."""
    return LOCAL.jitted, LOCAL.plain, LOCAL.trace, LOCAL.arguments, LOCAL.call, LOCAL.loop


def restore(calls: tuple[Any, ...]) -> None:
    """Let this thread run as without tools, inside `calls`."""
    LOCAL.jitted, LOCAL.plain, LOCAL.trace, LOCAL.arguments, LOCAL.call, LOCAL.loop = calls
    set_key(None)


def show_other_threads() -> None:
    """Give all threads without tools a new cache key, until `hide_other_threads` is called.

    JAX then has no entry in C++ for the next call of each jitted function in such a thread. So this
    call reaches `interception`, which notes that a thread without tools ran. It still uses the
    compiled program that JAX has, and later calls run in C++ again.
    """
    _KEY.set_global(("amanda", "threads", next(_TOOLS)))


def hide_other_threads() -> None:
    """Undo `show_other_threads`: threads without tools have the key None again."""
    _KEY.set_global(None)


def _refresh() -> None:
    key = LOCAL.key if LOCAL.jitted is None else LOCAL.jitted
    key = (key, LOCAL.call) if LOCAL.call else key
    LOCAL.current = _UNSET if key is None and LOCAL.hold is None else key
    if not LOCAL.plain:
        _set(LOCAL.current)


class _Plain:
    def __enter__(self) -> None:
        LOCAL.plain = depth = LOCAL.plain + 1  # Attributes of a `threading.local` are slow.
        if depth == 1:
            _set(None)

    def __exit__(self, *_: object) -> None:
        LOCAL.plain = depth = max(0, LOCAL.plain - 1)  # Tools that were removed inside restore it.
        if depth == 0:
            _set(LOCAL.current)  # A tool may have changed it.


#: Inside `with`, no operator is instrumented, and JAX uses the plain compiled programs.
PLAIN = _Plain()


class Program:
    """Suspends `PLAIN` inside ``with``, so that operators are instrumented again.

    The driver may run a whole compiled call as one operator, and runs operators inside `PLAIN`. The
    operators inside this call belong to the user's program.
    """

    def __enter__(self) -> None:
        self._before, LOCAL.plain = LOCAL.plain, 0
        _set(LOCAL.current)

    def __exit__(self, *_: object) -> None:
        LOCAL.plain = self._before
        if LOCAL.plain:
            _set(None)


class _InsideJit:
    def __enter__(self) -> None:
        LOCAL.jitted = ("jit", LOCAL.key)
        _refresh()

    def __exit__(self, *_: object) -> None:
        LOCAL.jitted = None
        _refresh()


#: Inside `with`, JAX uses the programs that it may call without asking the driver.
JITTED_CALL = _InsideJit()


def evaluated(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that computes for real, whatever is being traced or differentiated."""
    if LOCAL.trace is None:  # Nothing is, and contexts would only cost time.
        return function(*args)
    with PLAIN:
        return internals.call_evaluated(function, *args)
