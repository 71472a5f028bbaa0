"""Which interceptor of eager ops is used, and why: the native one or the one in Python.

Imports no TensorFlow. Both see the same: the native one only lets ops that are to be left alone
pass without running Python.
"""

from __future__ import annotations

from amanda_core.choice import NATIVE, Choice, choose
from amanda_driver_tf import _build

__all__ = ["NAMES", "VARIABLE", "Choice", "choice"]

#: Environment variable that names an interceptor.
VARIABLE = "AMANDA_TF_INTERCEPTOR"

NAMES = (NATIVE, "python")


def choice() -> Choice:
    """Which interceptor a session would use now, and why.

    Raises:
        UnsupportedError: The one that `AMANDA_TF_INTERCEPTOR` asks for is not available.
    """
    missing = _build.missing if _build.native is None else None
    return choose(
        VARIABLE, NAMES, missing, distribution="amanda-driver-tf", built="The extension is there"
    )
