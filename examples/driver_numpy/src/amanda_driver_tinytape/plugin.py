"""Plugin that the entry point ``amanda.drivers`` names: the hooks of the driver.

It must not import the framework, so that programs that do not use the framework do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable

from amanda_core.driver_kit import DeclaredHooks, Session
from amanda_core.interface import Attachment
from amanda_driver_tinytape.vocabulary import DECLARATIONS, describe

__all__ = ["HOOKS"]


def _attachment() -> Callable[[Session], Attachment]:
    from amanda_driver_tinytape.attachment import TapeAttachment

    return TapeAttachment


HOOKS = DeclaredHooks(DECLARATIONS, describe, _attachment)
