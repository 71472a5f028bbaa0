"""The pluggy plugin of TensorFlow's driver: what the entry point ``amanda.drivers`` names.

Owns the driver's description and the hooks. Imports TensorFlow only where it is loaded already.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from amanda_core import Attachment, DriverInfo, Finding, OpContext, hookimpl
from amanda_core.errors import UnsupportedError
from amanda_driver_tf._interceptor import choice
from amanda_driver_tf.vocabulary import BACKWARD_TYPES, OP_TYPES, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amanda_core import Session

__all__ = [
    "amanda_attach",
    "amanda_driver_info",
    "amanda_framework_imported",
    "amanda_preflight",
    "amanda_prepare_context",
]


@hookimpl
def amanda_driver_info() -> DriverInfo:
    """Describe the driver."""
    return DriverInfo(
        name="tensorflow",
        modules=("tensorflow",),
        namespaces=("tensorflow/*/eager", "tensorflow/*/function", "tensorflow/*/graph"),
        capabilities=frozenset(
            {
                "eager",
                "graph",
                "gradients",
                "aligned_gradients",
                "replace",
                "replace_backward",
                "autodiff",
                "staged",
                "steps",
                "scopes",
                "scope_events",
                "recomputation",
            }
        ),
        vocabulary={**OP_TYPES, **BACKWARD_TYPES},
    )


@hookimpl
def amanda_preflight() -> Sequence[Finding]:
    """Look for what in this environment would make results wrong."""
    import importlib_metadata

    installed = {
        name: importlib_metadata.version(name)
        for name in importlib_metadata.packages_distributions().get("tensorflow", ())
    }
    if not installed:
        return [Finding("error", "TensorFlow is not installed", "pip install tensorflow-cpu")]
    version = next(iter(installed.values()))
    findings = []
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 16):
        fix = "pip install -U tensorflow"
        findings.append(Finding("error", f"TensorFlow {version} is older than 2.16", fix))
    if "tensorflow.python.eager.context" in sys.modules:
        from amanda_driver_tf._graph import symbols

        findings += [
            Finding("error", f"TensorFlow {version} is not known: {problem}", "Use 2.21")
            for problem in symbols.problems()
        ]
        findings += _foreign()
    return [*findings, _interception()]


def _interception() -> Finding:
    """Which interceptor of eager operators is used, and why."""
    try:
        name, why = choice()
    except UnsupportedError as error:
        return Finding("error", error.what, error.fix)
    return Finding("info", f"Eager operators pass through the {name} interceptor. {why}")


def _foreign() -> list[Finding]:
    """What other libraries have put between a program and TensorFlow, named."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    findings = [
        Finding(
            "warning",
            f"An op callback is set: {callback.__module__}.{callback.__qualname__}",
            "It may replace outputs: tf.debugging.disable_check_numerics(), or remove it",
        )
        for callback in context.context().op_callbacks
    ]
    if tf.config.functions_run_eagerly():
        fix = "tf.config.run_functions_eagerly(False)"
        findings.append(Finding("info", "tf.functions run eagerly: nothing is a graph", fix))
    return findings


@hookimpl
def amanda_framework_imported() -> None:
    """Listen for gradients of graphs, which are built long before they run."""
    from amanda_driver_tf._graph import recorder

    recorder.install()


@hookimpl
def amanda_attach(session: Session) -> Attachment | None:
    """Start intercepting in the calling thread; None where TensorFlow is not loaded."""
    # `tensorflow` stands in sys.modules from the begin of its import on; its context comes late.
    if "tensorflow.python.eager.context" not in sys.modules:
        return None
    from amanda_driver_tf._attachment import TensorFlowAttachment

    attachment = TensorFlowAttachment(session)
    try:
        attachment.attach()
    except BaseException:
        attachment.detach()
        raise
    return attachment


@hookimpl
def amanda_prepare_context(context: OpContext) -> None:
    """Fill in the common words for an op of TensorFlow."""
    if context.namespace.startswith("tensorflow/"):
        describe(context)
