"""`Selection`: the ops, steps and calls of a model to which a tool is restricted.

Owns the predicates that `select` makes and how they are combined. A selection does not know tools
or sessions: it decides about one context, one step and one call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from amanda_core.errors import SelectionError
from amanda_core.interface.namespace import matches

if TYPE_CHECKING:
    from amanda_core.engine.context import OpContext

__all__ = ["Pattern", "Patterns", "Selection", "listed", "matcher", "select"]

#: A glob, whose ``*`` matches any characters, ``.`` and ``/`` included, or a regular expression,
#: which may match any part of the text.
Pattern = str | re.Pattern[str]
Patterns = Pattern | Sequence[Pattern]


class Selection:
    """A predicate of ops and steps, made by `select` and combined with ``&``, ``|`` and ``~``.

    >>> late_convolutions = select(op="conv*") & select(steps=range(100, 200))
    >>> str(late_convolutions | ~select(module="encoder.*"))
    "select(op='conv*') & select(steps=range(100, 200)) | ~select(module='encoder.*')"
    """

    def __init__(
        self,
        test: Callable[[OpContext, int, int | None], bool],
        text: str,
        phases: Sequence[Callable[[int, int | None], bool]] = (),
        by_call: bool = False,
        by_module: bool = False,
    ) -> None:
        self._test, self._text = test, text
        self._phases = tuple(phases)
        #: Whether it depends on the module.
        self.by_module = by_module
        #: Whether it depends on the call.
        self.by_call = by_call

    def __call__(self, context: OpContext, step: int = 0, call: int | None = None) -> bool:
        """Return True if the op of `context` is selected in a step and a call.

        Args:
            context: Context of the op.
            step: Number of the step, from 0.
            call: Number of the call of the outermost module in the step, from 0; None outside.
        """
        return self._test(context, step, call)

    def phase(self, step: int, call: int | None = None) -> tuple[bool, ...]:
        """Return the conditions that depend on the step and the call, evaluated there.

        Two steps and calls with the same phase select the same ops.
        """
        return tuple(test(step, call) for test in self._phases)

    def __and__(self, other: Selection) -> Selection:
        if not isinstance(other, Selection):
            return NotImplemented
        return Selection(
            lambda *at: self(*at) and other(*at),
            f"{self._inner()} & {other._inner()}",
            self._phases + other._phases,
            self.by_call or other.by_call,
            self.by_module or other.by_module,
        )

    def __or__(self, other: Selection) -> Selection:
        if not isinstance(other, Selection):
            return NotImplemented
        return Selection(
            lambda *at: self(*at) or other(*at),
            f"{self} | {other}",
            self._phases + other._phases,
            self.by_call or other.by_call,
            self.by_module or other.by_module,
        )

    def __invert__(self) -> Selection:
        text = f"({self})" if " " in self._text.partition("(")[0] or " & " in self._text else None
        return Selection(
            lambda *at: not self(*at),
            f"~{text or self._inner()}",
            self._phases,
            self.by_call,
            self.by_module,
        )

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<Selection {self._text}>"

    def _inner(self) -> str:
        return f"({self._text})" if " | " in self._text else self._text


def select(
    predicate: Callable[[OpContext], bool] | None = None,
    *,
    op: Patterns = (),
    module: Patterns = (),
    namespace: str = "",
    steps: range | slice | Sequence[int] | None = None,
    calls: range | slice | Sequence[int] | None = None,
) -> Selection:
    """Select ops for `Tool.where`. An argument that is left out selects all.

    Args:
        predicate: A function of the context, such as ``lambda context: context.zone == "model"``.
            It is called once per op and epoch and must always return the same.
        op: Patterns, one of which must match the op's type in the backend (``conv2d``), its common
            operator type (``context["type"]``) or its readable name. For a backward op these are
            its own type and name or those of its forward op.
        module: Patterns, one of which must match the path of the module in which the op runs.
        namespace: Framework, version and mode, as in mapping rules: ``pytorch``, ``*/*/graph``.
        steps: Numbers of steps, counted from 0 for each `apply`.
        calls: Numbers of calls of the outermost module, counted from 0 in each step and for each
            such module. In ``generate``, call 0 processes the prompt, and each further call one
            token. Ops outside of any module do not belong to a call.

    Raises:
        SelectionError: An argument is not of the expected kind.

    >>> convolutions = select(op=["conv*", "linear"], module="encoder.*")
    """
    parts: list[str] = []
    tests: list[Callable[[OpContext, int, int | None], bool]] = []
    phases: list[Callable[[int, int | None], bool]] = []
    if predicate is not None:
        if not callable(predicate) or isinstance(predicate, Selection):
            raise SelectionError(
                f"{predicate!r} is not a function of a context",
                fix="Write patterns by name: select(op='conv*'); combine selections with & and |",
            )
        function = predicate
        parts.append(getattr(function, "__qualname__", repr(function)))
        tests.append(lambda context, *_: bool(function(context)))
    if op:
        ops = matcher(listed("op", op))
        parts.append(f"op={op!r}")
        tests.append(lambda context, *_: any(map(ops, _names(context))))
    if module:
        modules = matcher(listed("module", module))
        parts.append(f"module={module!r}")
        tests.append(lambda context, *_: modules(context.module_path))
    if namespace:
        matches(namespace, "framework/version/mode")  # Raises if it is not a pattern.
        parts.append(f"namespace={namespace!r}")
        tests.append(lambda context, *_: matches(namespace, context.namespace))
    if steps is not None:
        in_steps = _numbers("steps", steps)
        parts.append(f"steps={steps!r}")
        tests.append(lambda _, step, call: in_steps(step))
        phases.append(lambda step, call: in_steps(step))
    if calls is not None:
        in_calls = _numbers("calls", calls)
        parts.append(f"calls={calls!r}")
        tests.append(lambda _, step, call: call is not None and in_calls(call))
        phases.append(lambda step, call: call is not None and in_calls(call))
    return Selection(
        lambda *at: all(test(*at) for test in tests),
        f"select({', '.join(parts)})",
        phases,
        calls is not None,
        bool(module),
    )


def _names(context: OpContext) -> list[str]:
    holders = [context] if context.forward is None else [context, context.forward]
    names = [name for holder in holders for name in (holder.op_type, holder.name)]
    names += [word for word in (context["type"], context["backward_type"]) if isinstance(word, str)]
    return names


def listed(name: str, given: Any) -> tuple[Pattern, ...]:
    """Return one or several patterns as a tuple.

    Args:
        name: Name of the argument, for messages.
        given: One pattern, or a list of patterns.

    Raises:
        SelectionError: It is neither.
    """
    patterns = [given] if isinstance(given, (str, re.Pattern)) else given
    if not isinstance(patterns, (list, tuple, set, frozenset)) or not all(
        isinstance(item, (str, re.Pattern)) and item for item in patterns
    ):
        raise SelectionError(
            f"{name}={given!r} is not a pattern or a list of patterns",
            fix=f"Write {name}='conv*' or {name}=['conv*', re.compile('norm$')]",
        )
    return tuple(patterns)


@lru_cache(maxsize=256)
def matcher(patterns: tuple[Pattern, ...]) -> Callable[[str], bool]:
    """Return a function that returns True if one of the patterns matches a text."""
    tests = [
        re.compile(translate(item)).match if isinstance(item, str) else item.search
        for item in patterns
    ]
    return lambda text: any(test(text) is not None for test in tests)


def _numbers(name: str, given: Any) -> Callable[[int], bool]:
    if isinstance(given, slice):
        start, stop, stride = given.start or 0, given.stop, given.step or 1
        if _are_counts(start, 0 if stop is None else stop) and _are_counts(stride - 1):
            return lambda number: (
                number >= start
                and (stop is None or number < stop)
                and (number - start) % stride == 0
            )
    elif isinstance(given, range):
        return given.__contains__
    elif isinstance(given, (list, tuple, set, frozenset)) and _are_counts(*given):
        return frozenset(given).__contains__
    raise SelectionError(
        f"{name}={given!r} is not a range or list of {name}",
        fix=f"Write {name}=range(10, 20), {name}=slice(10, None) or {name}=[0, 5]",
    )


def _are_counts(*values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
