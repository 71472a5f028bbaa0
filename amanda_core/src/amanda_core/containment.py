"""Calling code of installed plugins so that it cannot end the program that found it.

Owns which of their exceptions are contained, how one is described, and a warning that never
raises. Programs import `amanda` for its own sake: what somebody else installed beside it must not
be the reason that this import, or a command, ends.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from amanda_core.errors import AmandaWarning, DriverError

__all__ = ["contain", "described", "driver_errors", "warn", "without_exit"]

_LONGEST = 2000


def contain(error: BaseException) -> None:
    """Raise `error` again if it is Ctrl-C, which is meant for the program; else do nothing.

    Call it first in an ``except BaseException`` around the code of a plugin. `SystemExit` is
    contained: a plugin may not decide that the program ends.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error


def described(error: BaseException) -> str:
    """Return type and message of somebody else's exception, even if it cannot be written.

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


@contextmanager
def driver_errors(
    what: str, *, fix: str = "", passing: type[Exception] | tuple[()] = DriverError
) -> Iterator[None]:
    """Raise a `DriverError` for whatever the code of a plugin raises in this block.

    Args:
        what: What fails, as the beginning of a message.
        fix: What to do about it.
        passing: Exceptions that leave the block as they are, as Ctrl-C does. With `Exception` only
            the end of the program is contained.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except passing:
        raise
    except BaseException as error:
        raise DriverError(f"{what}: {described(error)}", fix=fix) from error


#: Extent in which a hook cannot end the program without a word, as `SystemExit` would.
without_exit = partial(driver_errors, fix="Upgrade or block it", passing=Exception)


def warn(message: str, stacklevel: int = 1) -> None:
    """Warn with `AmandaWarning`, also where warnings are errors: then on stderr.

    For what is found while something is imported. Raised there, the warning would be an import
    that fails, and nobody could tell it from one of the imported module.

    Args:
        message: The text.
        stacklevel: As seen by the caller.
    """
    try:
        warnings.warn(message, AmandaWarning, stacklevel=stacklevel + 1)
    except Exception:  # The warning itself, or whatever a program put in place of showing it.
        with suppress(Exception):
            print(f"AmandaWarning: {message}", file=sys.stderr, flush=True)
