"""Calling the code of installed plugins so that it cannot end the program.

Owns which of their exceptions are contained, and how an exception is described. A plugin that
somebody installed must not make `import amanda` or a command fail.
"""

from __future__ import annotations

from functools import partial

from amanda_core.errors import DriverError

__all__ = ["CALLERS", "contain", "described", "driver_errors", "without_exit"]

#: Packages that call Amanda for a program: the drivers that were registered, and their frameworks.
CALLERS: set[str] = set()

_LONGEST = 2000


def contain(error: BaseException) -> None:
    """Raise `error` again if it is Ctrl-C, which the program must get; else do nothing.

    Call it first in an ``except BaseException`` around the code of a plugin. `SystemExit` is
    contained, because a plugin must not end the program.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error


def described(error: BaseException) -> str:
    """Return the type and message of an exception, even if its message cannot be read.

    >>> described(ImportError("libtoy.so is missing"))
    'ImportError: libtoy.so is missing'
    """
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as second:
        contain(second)
        return f"{name} (its message cannot be shown: {type(second).__name__})"
    return f"{name}: {text[:_LONGEST]}"


class driver_errors:
    """Turn exceptions of a plugin's code in this block into a `DriverError`.

    Args:
        what: What fails, as the beginning of a message.
        fix: What to do about it.
        passing: Exceptions that are not turned. Ctrl-C never is. With `Exception`, only exceptions
            that would end the program are, such as `SystemExit`.
    """

    # Not a generator, which takes three times as long: `apply` enters several.
    def __init__(
        self, what: str, *, fix: str = "", passing: type[Exception] | tuple[()] = DriverError
    ) -> None:
        self._what, self._fix, self._passing = what, fix, passing

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not isinstance(error, (KeyboardInterrupt, self._passing)):
            raise DriverError(f"{self._what}: {described(error)}", fix=self._fix) from error


#: Turns `SystemExit` in this block into a `DriverError`, so that a hook cannot end the program.
without_exit = partial(driver_errors, fix="Upgrade or block it", passing=Exception)
