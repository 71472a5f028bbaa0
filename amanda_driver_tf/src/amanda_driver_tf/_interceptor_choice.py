"""The interceptors of this driver, of which the core chooses one. Imports no TensorFlow.

Both see the same: the native one only lets ops that are to be left alone pass without running
Python.
"""

from __future__ import annotations

from amanda_core.interceptors import Extension, Interceptors
from amanda_driver_tf._versions import VERSIONS

__all__ = ["INTERCEPTORS"]


def _extension() -> Extension:
    from amanda_driver_tf import _build

    return Extension(_build.missing if _build.native is None else None, "The extension is there")


INTERCEPTORS = Interceptors(
    VERSIONS, python="python", extension=_extension, operators="Eager operators"
)
