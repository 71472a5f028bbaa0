"""Which of several implementations of one thing a driver uses, and why.

Owns the rule for drivers that have an optional native part: an environment variable may ask for one
by name; else it is the native one where it is there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from amanda_core.errors import UnsupportedError

__all__ = ["NATIVE", "Choice", "choose"]

#: Name of the native implementation, which stands first where it is built.
NATIVE = "native"


class Choice(NamedTuple):
    """An implementation.

    Attributes:
        name: Its name.
        why: A sentence that says why this one.
    """

    name: str
    why: str


def choose(
    variable: str, names: Sequence[str], missing: str | None, *, distribution: str, built: str
) -> Choice:
    """The implementation that is asked for, or else the best that there is.

    Args:
        variable: Environment variable that asks for one.
        names: `NATIVE` and the one that is always there.
        missing: Why the native one is not there; None where it is.
        distribution: Name of the driver's distribution.
        built: What is to be said of the native one where it is there.

    Raises:
        UnsupportedError: The one that is asked for is not available.
    """
    asked = os.environ.get(variable)
    if asked and asked not in names:
        raise UnsupportedError(
            f"{variable}={asked} names no interceptor",
            where=distribution,
            fix=f"Use one of: {', '.join(names)}",
        )
    if asked == NATIVE and missing is not None:
        raise UnsupportedError(
            f"{variable}={NATIVE}, but {missing}",
            where=distribution,
            fix=f"Install a compiler and then {distribution} anew, or unset the variable",
        )
    if asked:
        return Choice(asked, f"{variable} asks for it")
    if missing is not None:
        return Choice(names[1], f"There is no native one: {missing}")
    return Choice(NATIVE, built)
