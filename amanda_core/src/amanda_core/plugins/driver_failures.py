"""Handling of operators at which a driver itself fails.

Owns the decision whose error it is, the policy (raise, or continue without the operator), and the
list of operators that were skipped. An error of the operator, of a routine, or one that Amanda
raises on purpose is not the driver's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from amanda_core.errors import AmandaError, ConfigError, annotate, is_annotated
from amanda_core.interface.driver import CoverageGap

__all__ = ["DriverFailures", "OnDriverError", "OriginalCall", "check_policy", "is_noted"]

OnDriverError = Literal["raise", "skip"]

_BEGINNING = "This is an error of Amanda's driver, not of the program or of a tool"
_NOTE = (
    _BEGINNING + ": it occurred while the driver instrumented {where}. Please report it with this "
    "traceback and the output of `amanda doctor`. To continue without this operator: "
    "amanda.apply(..., on_driver_error='skip'), or `amanda run --keep-going`"
)
#: Errors that any line of a program may raise: no memory or stack is left, a warning is an error.
_ANYWHERE = (AmandaError, Warning, MemoryError, RecursionError)


def check_policy(policy: str) -> None:
    """Raise an error unless `policy` is one of the two policies.

    Raises:
        ConfigError: It is neither.
    """
    if policy not in ("raise", "skip"):
        raise ConfigError(
            f"on_driver_error={policy!r} is not a policy",
            where="amanda.apply",
            fix="Pass 'raise' or 'skip'",
        )


def is_noted(error: BaseException) -> bool:
    """Return True if a note on an error says that it is a driver's own."""
    return any(str(note).startswith(_BEGINNING) for note in getattr(error, "__notes__", ()))


class OriginalCall:
    """The original operator in one execution: whether it has run, and what it returned.

    Args:
        call: Runs the original.
        keeps: Whether to keep the result for `DriverFailures.recover`. Otherwise it is not held,
            because tools measure which values a program frees.
    """

    __slots__ = ("_call", "_keeps", "error", "has_begun", "has_result", "result")

    def __init__(self, call: Callable[..., Any], keeps: bool) -> None:
        self._call, self._keeps = call, keeps
        self.has_begun = self.has_result = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original."""
        self.has_begun = True
        try:
            result = self._call(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.has_result, self.result = self._keeps, result if self._keeps else None
        return result

    def keep(self, result: Any) -> None:
        """Keep the result that the program gets if the driver fails afterwards."""
        self.has_begun, self.has_result = True, self._keeps
        self.result = result if self._keeps else None

    def drop(self) -> None:
        """Drop the result, because the program must not get it as the operator's result."""
        self.result, self.has_result = None, False

    def forget(self) -> None:
        """Drop all references, because a cycle or a traceback may keep this object alive."""
        self.result = self.error = None
        self._keeps = False  # A replacement may keep the call.


class DriverFailures:
    """The operators at which drivers failed in one session.

    Args:
        policy: What happens at the next failure.
        skipped: Called with the operator and the reason if one is skipped.

    Attributes:
        policy: What happens at the next failure.
    """

    def __init__(
        self,
        policy: OnDriverError = "raise",
        skipped: Callable[[str, str], None] = lambda where, why: None,
    ) -> None:
        self.policy: OnDriverError = policy
        self._skipped = skipped
        self._found: dict[str, dict[str, str]] = {}

    def original(self, call: Callable[..., Any]) -> OriginalCall:
        """Wrap the original operator for one execution."""
        return OriginalCall(call, self.policy == "skip")

    @staticmethod
    def is_drivers(error: BaseException, original: OriginalCall | None = None) -> bool:
        """Return True if an error that leaves a driver's code is the driver's own."""
        return (
            isinstance(error, Exception)
            and not isinstance(error, _ANYWHERE)
            and not is_annotated(error)
            and (original is None or error is not original.error)
        )

    def report(self, error: Exception, namespace: str, where: str) -> None:
        """Raise an error that left a driver's code, or list it if it is the driver's own."""
        if not self.is_drivers(error):
            raise error
        self.note(error, namespace, where)

    def recover(
        self,
        error: Exception,
        namespace: str,
        where: str,
        original: OriginalCall,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Continue after a driver's own error, if the policy allows it.

        Returns:
            The result of the original operator, which runs now if it has not begun.

        Raises:
            Exception: The error, with a note.
        """
        # An operator that has begun must not run again: it may have written its input or drawn a
        # random number.
        self.note(error, namespace, where, can_go_on=original.has_result or not original.has_begun)
        return original.result if original.has_result else original(*args, **(kwargs or {}))

    def note(self, error: Exception, namespace: str, where: str, *, can_go_on: bool = True) -> None:
        """List a driver's own error, or raise it with a note."""
        if self.policy != "skip" or not can_go_on:
            annotate(error, _NOTE.format(where=where))
            raise error
        self._skipped(where, "where a driver failed")
        framework = namespace.partition("/")[0]
        self._found.setdefault(framework, {}).setdefault(
            where, f"the driver failed there: {type(error).__name__}: {error}"
        )

    def coverage(self, framework: str) -> list[CoverageGap]:
        """Return the operators of a framework that were skipped, and why."""
        return [CoverageGap(where, why) for where, why in self._found.get(framework, {}).items()]
