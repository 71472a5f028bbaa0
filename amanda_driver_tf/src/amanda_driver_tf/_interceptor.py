"""Which interceptor of eager ops is used, and why: the native one or the one in Python.

Owns the choice among those that this installation has; imports no TensorFlow. Both see the same:
the native one only lets ops that are to be left alone pass without running Python.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from amanda_core.errors import UnsupportedError
from amanda_driver_tf import _build

__all__ = ["NAMES", "VARIABLE", "Choice", "choice"]

#: Environment variable that names an interceptor.
VARIABLE = "AMANDA_TF_INTERCEPTOR"

NAMES = ("native", "python")


class Choice(NamedTuple):
    """Which interceptor the next session uses.

    Attributes:
        name: ``native`` or ``python``.
        why: A sentence that says why this one.
    """

    name: str
    why: str


def choice() -> Choice:
    """Which interceptor a session would use now, and why.

    Raises:
        UnsupportedError: The one that `AMANDA_TF_INTERCEPTOR` asks for is not available.
    """
    asked = os.environ.get(VARIABLE)
    if asked and asked not in NAMES:
        raise UnsupportedError(
            f"{VARIABLE}={asked} names no interceptor",
            where="amanda-driver-tf",
            fix=f"Use one of: {', '.join(NAMES)}",
        )
    if asked == "native" and _build.native is None:
        raise UnsupportedError(
            f"{VARIABLE}=native, but {_build.missing}",
            where="amanda-driver-tf",
            fix="Install a C compiler and then amanda-driver-tf anew, or unset the variable",
        )
    if asked:
        return Choice(asked, f"{VARIABLE} asks for it")
    if _build.native is None:
        return Choice("python", f"There is no native one: {_build.missing}")
    return Choice("native", "The extension is there")
