"""What ``driver.toml`` declares, such as the common operator types of tinytape's operators."""

from __future__ import annotations

from amanda_core.driver_kit import Declarations, OpContext

__all__ = ["DECLARATIONS", "describe"]

DECLARATIONS = Declarations("amanda_driver_tinytape")


def describe(context: OpContext) -> None:
    """Add the common types to the context of an op or backward op."""
    DECLARATIONS.describe(context)
