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


class ToolError(AmandaError, TypeError):
    """Something that is not a usable tool was applied, or a tool was registered wrongly."""

    slug = "bad-tool"


class DependencyCycleError(AmandaError):
    """Tools depend on one another in a circle."""

    slug = "dependency-cycle"


class ActionError(AmandaError):
    """Base of the errors about what an analysis routine asked for."""

    slug = "bad-action"


class PositionError(ActionError, IndexError):
    """An action names an input, output or gradient that the op does not have."""

    slug = "bad-position"


class LateActionError(ActionError):
    """An action was asked for after the point at which it would have taken effect."""

    slug = "late-action"


class ReplacementConflictError(ActionError):
    """Two replacements of one op at one point."""

    slug = "replacement-conflict"


class RoutineResultError(ActionError):
    """An instrumentation routine returned a wrong number of values, or none where one is due."""

    slug = "routine-result"


class ObserverResultError(RoutineResultError):
    """A routine that was inserted with ``observe=True`` returned something other than None."""

    slug = "observer-result"


class EditError(ActionError):
    """A routine returned a value that cannot stand where the old one stood."""

    slug = "bad-edit"


class UnsupportedError(ActionError, NotImplementedError):
    """A backend lacks what was asked for, and says so instead of doing something else."""

    slug = "unsupported"


class StaleContextError(AmandaError, RuntimeError):
    """Tensors of a context were read after the call for which they were valid."""

    slug = "stale-context"


class ReentryError(AmandaError, RuntimeError):
    """Tools were applied inside a routine."""

    slug = "apply-in-routine"


class ThreadError(AmandaError, RuntimeError):
    """`apply` was entered in one thread and left in another."""

    slug = "wrong-thread"


class NamespaceError(AmandaError, ValueError):
    """A namespace is not of the form ``framework/version/mode``."""

    slug = "bad-namespace"


class MappingRuleError(AmandaError, TypeError):
    """A mapping rule is not ``[namespace, before]`` or ``[namespace, before, after]``."""

    slug = "bad-rule"


class SelectionError(AmandaError, ValueError):
    """A selection of ops or steps is not of the form that `select` takes."""

    slug = "bad-selection"


class DriverError(AmandaError):
    """A driver cannot be loaded, speaks another API, or fails to attach."""

    slug = "broken-driver"


class MissingDriverError(DriverError):
    """No driver is installed, or none of the name asked for."""

    slug = "missing-driver"


class MissingToolsError(AmandaError, ImportError):
    """The distribution that holds the tools is not installed."""

    slug = "missing-tools"


class ConfigError(AmandaError, ValueError):
    """A configuration, an environment variable or a flag is malformed; names file and line."""

    slug = "bad-config"


class OptionError(ConfigError):
    """An option of a tool is unknown, missing, or of a type that the tool does not take."""

    slug = "bad-option"


class UnknownToolError(ConfigError):
    """No tool of that name is installed, or it is blocked."""

    slug = "unknown-tool"


class BrokenToolError(AmandaError):
    """An installed tool cannot be loaded, or what it names makes no tool."""

    slug = "broken-tool"


class OutputError(AmandaError, OSError):
    """Results cannot be written where they should go, or would be written outside of it."""

    slug = "bad-output"


class ResultError(AmandaError, ValueError):
    """A file of results is malformed or too large."""

    slug = "bad-result"


class MissingExtraError(AmandaError, ImportError):
    """The command line, or a form of output, was used without the packages that it needs."""

    slug = "missing-extra"


class AmandaWarning(UserWarning):
    """Category of all warnings of Amanda, so that they can be filtered."""


def is_annotated(error: BaseException) -> bool:
    """Return True if `annotate` has seen the exception: it came out of a routine."""
    return getattr(error, "__amanda__", False) is True


def annotate(error: BaseException, note: str) -> None:
    """Add a note to somebody else's exception; Python 3.10 stores it without showing it."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
    error.__amanda__ = True  # type: ignore[attr-defined]
