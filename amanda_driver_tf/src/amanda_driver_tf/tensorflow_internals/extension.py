"""The native extension: whether this installation has it, and why not.

Owns its import; everything that needs it imports it from here.
"""

from __future__ import annotations

import sys
from typing import Any

from amanda_core.driver_kit import NATIVE, load_extension
from amanda_driver_tf.tensorflow_internals.versions import VERSIONS

__all__ = ["knows_frames", "missing", "native"]


def knows_frames(module: Any) -> bool:
    """Return True if the extension reads this interpreter's frames correctly."""

    # At the same depth as when an op is located.
    def locate() -> bool:
        inner, outer = sys._getframe(2), sys._getframe(3)
        here = ((0, inner.f_code, inner.f_lasti), (1, outer.f_code, outer.f_lasti))
        nearly = ((0, inner.f_code, inner.f_lasti + 2),)
        return bool(module.CallSite(here).here()) and not module.CallSite(nearly).here()

    def pass_on() -> bool:
        return locate()

    return pass_on()


#: The extension module or None, and why there is none.
native, missing = load_extension("amanda_driver_tf._native")
if native is not None:
    other = "the extension was built for a Python with other frames"
    missing = VERSIONS.failure(NATIVE) if knows_frames(native) else other
    native = None if missing else native
