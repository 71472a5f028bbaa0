"""The engine of Amanda: tools, contexts, actions, plans, sessions, and the interface of drivers.

Users import `amanda`, which re-exports what they need. Authors of drivers import `amanda_core`.
Never imports numpy or a framework.
"""

from __future__ import annotations

from amanda_core.engine.action import Action, ActionKind, IPoint
from amanda_core.engine.context import OpContext
from amanda_core.engine.plan import Plan, Step
from amanda_core.engine.session import Session
from amanda_core.engine.tool import Tool
from amanda_core.interface.driver import (
    DRIVER_API,
    Attachment,
    CoverageGap,
    DescribingAttachment,
    DriverInfo,
    DriverStatus,
    Finding,
    NotifiedAttachment,
    Site,
)
from amanda_core.interface.hookspecs import hookimpl

__version__ = "0.1.0"

__all__ = [
    "DRIVER_API",
    "Action",
    "ActionKind",
    "Attachment",
    "CoverageGap",
    "DescribingAttachment",
    "DriverInfo",
    "DriverStatus",
    "Finding",
    "IPoint",
    "NotifiedAttachment",
    "OpContext",
    "Plan",
    "Session",
    "Site",
    "Step",
    "Tool",
    "__version__",
    "hookimpl",
]
