"""The interceptors of this driver, one of which the core chooses. Does not import TensorFlow.

Both see the same operators. The native one avoids running Python for operators that need nothing.
"""

from __future__ import annotations

from amanda_core.driver_kit import Extension, Interceptors
from amanda_driver_tf.tensorflow_internals.versions import VERSIONS

__all__ = ["INTERCEPTORS"]


def _state_of_extension() -> Extension:
    from amanda_driver_tf.tensorflow_internals import extension

    missing = extension.missing if extension.native is None else None
    return Extension(missing, "The extension is there")


INTERCEPTORS = Interceptors(
    VERSIONS, python="python", extension=_state_of_extension, operators="Eager operators"
)
