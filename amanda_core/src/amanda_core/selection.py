"""`Selection`: which ops, and in which steps, a tool is for.

Owns the predicates that `select` makes and how they are combined. A selection knows neither tools
nor sessions: it is asked about one context and one step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from amanda_core.errors import SelectionError
from amanda_core.namespace import matches

if TYPE_CHECKING:
    from amanda_core.context import OpContext

__all__ = ["Pattern", "Selection", "select"]

#: A glob (``*`` stands for any characters, ``.`` and ``/`` included) or a regular expression, of
#: which a part that matches somewhere is enough.
Pattern = str | re.Pattern[str]


class Selection:
    """A predicate of ops and steps; made by `select`, combined by ``&``, ``|`` and ``~``.

    >>> late_convolutions = select(op="conv*") & select(steps=range(100, 200))
    >>> str(late_convolutions | ~select(module="encoder.*"))
    "select(op='conv*') & select(steps=range(100, 200)) | ~select(module='encoder.*')"
    """

    def __init__(
        self,
        test: Callable[[OpContext, int], bool],
        text: str,
        phases: Sequence[Callable[[int], bool]] = (),
    ) -> None:
        self._test, self._text = test, text
        self._phases = tuple(phases)

    def __call__(self, context: OpContext, step: int = 0) -> bool:
        """Return True if the op of `context` is selected in a step, counted from 0."""
        return self._test(context, step)

    def phase(self, step: int) -> tuple[bool, ...]:
        """Return the step-dependent conditions, evaluated at `step`.

        Two steps with the same phase select the same ops.
        """
        return tuple(test(step) for test in self._phases)

    def __and__(self, other: Selection) -> Selection:
        if not isinstance(other, Selection):
            return NotImplemented
        return Selection(
            lambda context, step: self(context, step) and other(context, step),
            f"{self._inner()} & {other._inner()}",
            self._phases + other._phases,
        )

    def __or__(self, other: Selection) -> Selection:
        if not isinstance(other, Selection):
            return NotImplemented
        return Selection(
            lambda context, step: self(context, step) or other(context, step),
            f"{self} | {other}",
            self._phases + other._phases,
        )

    def __invert__(self) -> Selection:
        text = f"({self})" if " " in self._text.partition("(")[0] or " & " in self._text else None
        return Selection(
            lambda context, step: not self(context, step),
            f"~{text or self._inner()}",
            self._phases,
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
    op: Pattern | Sequence[Pattern] = (),
    module: Pattern | Sequence[Pattern] = (),
    namespace: str = "",
    steps: range | slice | Sequence[int] | None = None,
) -> Selection:
    """Select ops for `Tool.where`; what is left out selects all.

    Args:
        predicate: A function of the context, such as ``lambda context: context.zone == "model"``.
            It is asked once per op and epoch and must always answer the same.
        op: Patterns of which one is to match the op's type in the backend (``conv2d``), its common
            word (``context["type"]``) or its readable name. Of a backward op its own type and name
            or those of its forward op.
        module: Patterns of which one is to match the path of the module in which the op runs.
        namespace: Framework, version and mode, as in mapping rules: ``pytorch``, ``*/*/graph``.
        steps: Numbers of steps, counted from 0 for each `apply`.

    Raises:
        SelectionError: An argument is not of the kind that is expected.

    >>> convolutions = select(op=["conv*", "linear"], module="encoder.*")
    """
    parts: list[str] = []
    tests: list[Callable[[OpContext, int], bool]] = []
    phases: list[Callable[[int], bool]] = []
    if predicate is not None:
        if not callable(predicate) or isinstance(predicate, Selection):
            raise SelectionError(
                f"{predicate!r} is no function of a context",
                fix="Write patterns by name: select(op='conv*'); combine selections with & and |",
            )
        function = predicate
        parts.append(getattr(function, "__qualname__", repr(function)))
        tests.append(lambda context, _: bool(function(context)))
    if op:
        ops = _patterns("op", op)
        parts.append(f"op={op!r}")
        tests.append(lambda context, _: any(map(ops, _names(context))))
    if module:
        modules = _patterns("module", module)
        parts.append(f"module={module!r}")
        tests.append(lambda context, _: modules(context.module_path))
    if namespace:
        matches(namespace, "framework/version/mode")  # Raises for what is no pattern.
        parts.append(f"namespace={namespace!r}")
        tests.append(lambda context, _: matches(namespace, context.namespace))
    if steps is not None:
        within = _steps(steps)
        parts.append(f"steps={steps!r}")
        tests.append(lambda _, step: within(step))
        phases.append(within)
    return Selection(
        lambda context, step: all(test(context, step) for test in tests),
        f"select({', '.join(parts)})",
        phases,
    )


def _names(context: OpContext) -> list[str]:
    holders = [context] if context.forward is None else [context, context.forward]
    names = [name for holder in holders for name in (holder.op_type, holder.name)]
    names += [word for word in (context["type"], context["backward_type"]) if isinstance(word, str)]
    return names


def _patterns(name: str, given: Any) -> Callable[[str], bool]:
    listed = [given] if isinstance(given, (str, re.Pattern)) else given
    if not isinstance(listed, (list, tuple, set, frozenset)) or not all(
        isinstance(item, (str, re.Pattern)) and item for item in listed
    ):
        raise SelectionError(
            f"{name}={given!r} is no pattern and no list of patterns",
            fix=f"Write {name}='conv*' or {name}=['conv*', re.compile('norm$')]",
        )
    tests = [
        re.compile(translate(item)).match if isinstance(item, str) else item.search
        for item in listed
    ]
    return lambda text: any(test(text) is not None for test in tests)


def _steps(given: Any) -> Callable[[int], bool]:
    if isinstance(given, slice):
        start, stop, stride = given.start or 0, given.stop, given.step or 1
        if _are_counts(start, 0 if stop is None else stop) and _are_counts(stride - 1):
            return lambda step: (
                step >= start and (stop is None or step < stop) and (step - start) % stride == 0
            )
    elif isinstance(given, range):
        return given.__contains__
    elif isinstance(given, (list, tuple, set, frozenset)) and _are_counts(*given):
        return frozenset(given).__contains__
    raise SelectionError(
        f"steps={given!r} is no range of steps",
        fix="Write steps=range(10, 20), steps=slice(10, None) or steps=[0, 5]",
    )


def _are_counts(*values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
