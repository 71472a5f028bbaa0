"""The engine of Amanda: tools, contexts, actions, plans, sessions, and the interface of drivers.

Users import `amanda`, which re-exports what they need. Authors of drivers import `amanda_core`.
Never imports numpy or a framework.
"""

from __future__ import annotations

from amanda_core.action import Action, ActionKind, IPoint
from amanda_core.context import OpContext
from amanda_core.driver import (
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
from amanda_core.hookspecs import hookimpl
from amanda_core.plan import Plan, Step
from amanda_core.session import Session
from amanda_core.tool import Tool

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
