"""The interceptors of this driver, one of which the core chooses. Does not import torch."""

from __future__ import annotations

from amanda_core.driver_kit import Extension, Interceptors
from amanda_driver_torch.torch_internals.versions import VERSIONS

__all__ = ["INTERCEPTORS"]


def _extension() -> Extension:
    from amanda_driver_torch.torch_internals import extension

    if extension.native is None:
        return Extension(extension.missing, "")
    return Extension(None, f"The extension is there; it reads {extension.native.FRAMES}")


INTERCEPTORS = Interceptors(
    VERSIONS, python="function_mode", extension=_extension, operators="Operators"
)
