"""The plugin that the entry point ``amanda.drivers`` names: description and hooks.

It must not import the framework: a person who does not use it must not wait for it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from amanda_core import Attachment, DriverInfo, Finding, OpContext, Session, hookimpl
from amanda_driver_tinytape.vocabulary import OP_TYPES, describe

__all__ = ["amanda_attach", "amanda_driver_info", "amanda_preflight", "amanda_prepare_context"]


@hookimpl
def amanda_driver_info() -> DriverInfo:
    """Describe the driver. Of what is not among the capabilities, tools are told so."""
    return DriverInfo(
        api=2,
        name="tinytape",
        modules=("tinytape",),
        namespaces=("tinytape/*/eager",),
        capabilities=frozenset(
            {
                "eager",
                "gradients",
                "aligned_gradients",
                "late_gradients",
                "replace",
                "replace_backward",
                "autodiff",
                "observers",
                "steps",
                "ordered",
                "facts",
            }
        ),
        vocabulary=OP_TYPES,
    )


@hookimpl
def amanda_preflight() -> Sequence[Finding]:
    """Look for what would make results wrong."""
    if importlib.util.find_spec("tinytape") is None:
        fix = "pip install --force-reinstall amanda-driver-tinytape, which it comes with"
        return [Finding("error", "tinytape is not installed", fix)]
    return []


@hookimpl
def amanda_attach(session: Session) -> Attachment | None:
    """Start intercepting; None where the framework is not loaded. Called again when it is."""
    # In sys.modules from the begin of its import on; `run` tells that it is through.
    if not hasattr(sys.modules.get("tinytape"), "sgd"):
        return None
    from amanda_driver_tinytape.attachment import attach

    return attach(session)


@hookimpl
def amanda_prepare_context(context: OpContext) -> None:
    """Fill in the common words. Called for the contexts of all drivers, so look whose it is."""
    if context.namespace.startswith("tinytape/"):
        describe(context)
