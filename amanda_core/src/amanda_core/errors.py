"""The tree of errors: every error Amanda raises by itself, each with a stable slug.

Owns nothing but the classes. A message says what is wrong, where (tool, driver, op, point) and what
to do next; `docs/errors.md` explains each slug. An exception of a user's routine is never one of
these: it propagates with its own type and a note (see `annotate`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

__all__ = [
    "ActionError",
    "AmandaError",
    "AmandaWarning",
    "BrokenToolError",
    "ConfigError",
    "DependencyCycleError",
    "DriverError",
    "EditError",
    "LateActionError",
    "MappingRuleError",
    "MissingDriverError",
    "MissingExtraError",
    "MissingToolsError",
    "NamespaceError",
    "ObserverResultError",
    "OptionError",
    "OutputError",
    "PositionError",
    "ReentryError",
    "ReplacementConflictError",
    "ResultError",
    "RoutineResultError",
    "SelectionError",
    "StaleContextError",
    "ThreadError",
    "ToolError",
    "UnknownToolError",
    "UnsupportedError",
    "VaryingWeightWarning",
    "annotate",
    "is_annotated",
]


class AmandaError(Exception):
    """Base of all errors that Amanda raises by itself.

    Args:
        what: What is wrong, in one sentence.
        where: The tool, driver, op and point concerned, or an empty string.
        fix: What to do next, in one sentence, or an empty string.
    """

    #: Stable name of the kind of error, explained in ``docs/errors.md``.
    slug: ClassVar[str] = "amanda"

    def __init_subclass__(cls, slug: str = "", **more: Any) -> None:
        super().__init_subclass__(**more)
        if slug:
            cls.slug = slug

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        parts = [what.rstrip(".") + "."]
        if where:
            parts.append(f"Where: {where}.")
        if fix:
            parts.append(fix.rstrip(".") + ".")
        super().__init__(" ".join(parts) + f" [{self.slug}]")

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between processes (data-loader workers); the message is made of its parts.
        return (partial(type(self), where=self.where, fix=self.fix), (self.what,))


class ToolError(AmandaError, TypeError, slug="bad-tool"):
    """Something that is not a usable tool was applied, or a tool was registered wrongly."""


class DependencyCycleError(AmandaError, slug="dependency-cycle"):
    """Tools depend on one another in a circle."""


class ActionError(AmandaError, slug="bad-action"):
    """Base of the errors about requests of an analysis routine."""


class PositionError(ActionError, IndexError, slug="bad-position"):
    """An action names an input, output or gradient that the op does not have."""


class LateActionError(ActionError, slug="late-action"):
    """An action was requested after the point at which it would have taken effect."""


class ReplacementConflictError(ActionError, slug="replacement-conflict"):
    """Two replacements of one op at one point."""


class RoutineResultError(ActionError, slug="routine-result"):
    """An instrumentation routine returned a wrong number of values, or no required value."""


class ObserverResultError(RoutineResultError, slug="observer-result"):
    """A routine that was inserted with ``observe=True`` returned something other than None."""


class EditError(ActionError, slug="bad-edit"):
    """A routine returned a value that cannot replace the old one."""


class UnsupportedError(ActionError, NotImplementedError, slug="unsupported"):
    """A backend does not support what was requested."""


class StaleContextError(AmandaError, RuntimeError, slug="stale-context"):
    """Tensors of a context were read after the call for which they were valid."""


class ReentryError(AmandaError, RuntimeError, slug="apply-in-routine"):
    """Tools were applied inside a routine."""


class ThreadError(AmandaError, RuntimeError, slug="wrong-thread"):
    """`apply` was entered in one thread and left in another."""


class NamespaceError(AmandaError, ValueError, slug="bad-namespace"):
    """A namespace is not of the form ``framework/version/mode``."""


class MappingRuleError(AmandaError, TypeError, slug="bad-rule"):
    """A mapping rule is not ``[namespace, before]`` or ``[namespace, before, after]``."""


class SelectionError(AmandaError, ValueError, slug="bad-selection"):
    """A selection of ops or steps is not of the form that `select` takes."""


class DriverError(AmandaError, slug="broken-driver"):
    """A driver cannot be loaded, speaks another API, or fails to attach."""


class MissingDriverError(DriverError, slug="missing-driver"):
    """No driver is installed, or none with the requested name."""


class MissingToolsError(AmandaError, ImportError, slug="missing-tools"):
    """The distribution of the tools is not installed."""


class ConfigError(AmandaError, ValueError, slug="bad-config"):
    """A configuration, an environment variable or a flag is malformed; names file and line."""


class OptionError(ConfigError, slug="bad-option"):
    """An option of a tool is unknown, missing, or of a type that the tool does not take."""


class UnknownToolError(ConfigError, slug="unknown-tool"):
    """No tool of that name is installed, or it is blocked."""


class BrokenToolError(AmandaError, slug="broken-tool"):
    """An installed tool cannot be loaded, or its factory does not return a tool."""


class OutputError(AmandaError, OSError, slug="bad-output"):
    """Results cannot be written to their folder, or would be written outside of it."""


class ResultError(AmandaError, ValueError, slug="bad-result"):
    """A file of results is malformed or too large."""


class MissingExtraError(AmandaError, ImportError, slug="missing-extra"):
    """The command line or an output format was used without the packages that it needs."""


class AmandaWarning(UserWarning):
    """Category of all warnings of Amanda, so that they can be filtered."""


class VaryingWeightWarning(AmandaWarning):
    """A tool keeps something by operator, and the operator reads other weights at other times."""


def is_annotated(error: BaseException) -> bool:
    """Return True if `annotate` has seen the exception: it came out of a routine."""
    return getattr(error, "__amanda__", False) is True


def annotate(error: BaseException, note: str) -> None:
    """Add a note to an exception, and mark it as one that came out of a routine."""
    error.add_note(note)
    error.__amanda__ = True  # type: ignore[attr-defined]


def take(pending: list[BaseException], error: BaseException) -> BaseException:
    """Empty `pending`, the deferred exceptions, into notes on `error`, and return it."""
    for other in pending:
        if other is not error:
            annotate(error, f"Then also {type(other).__name__}: {other}")
    pending.clear()
    return error
