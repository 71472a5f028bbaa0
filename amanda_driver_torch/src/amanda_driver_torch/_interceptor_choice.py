"""The interceptors of this driver, of which the core chooses one. Imports no torch."""

from __future__ import annotations

from amanda_core.interceptors import Extension, Interceptors
from amanda_driver_torch._versions import VERSIONS

__all__ = ["INTERCEPTORS"]


def _extension() -> Extension:
    from amanda_driver_torch import _build

    if _build.native is None:
        return Extension(_build.missing, "")
    return Extension(None, f"The extension is there; it reads {_build.native.FRAMES}")


INTERCEPTORS = Interceptors(
    VERSIONS, python="function_mode", extension=_extension, operators="Operators"
)
