"""The pluggy plugin of TensorFlow's driver, named by the entry point ``amanda.drivers``.

Owns the driver's description and its hooks. Uses TensorFlow only if it is imported already.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from amanda_core.driver_kit import OpContext
from amanda_core.interface import Attachment, DriverInfo, DriverStatus, Finding, hookimpl
from amanda_driver_tf.interceptor_choice import INTERCEPTORS
from amanda_driver_tf.tensorflow_internals.names import LAST_MODULE
from amanda_driver_tf.tensorflow_internals.versions import VERSIONS
from amanda_driver_tf.vocabulary import BACKWARD_TYPES, OP_TYPES, describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from amanda_core.driver_kit import Session
    from amanda_driver_tf.attachment import TensorFlowAttachment

__all__ = [
    "amanda_attach",
    "amanda_driver_info",
    "amanda_driver_status",
    "amanda_exported",
    "amanda_framework_imported",
    "amanda_preflight",
    "amanda_prepare_context",
]

_CAPABILITIES = frozenset(
    {
        "gradients",
        "aligned_gradients",
        "late_gradients",
        "replace",
        "replace_backward",
        "autodiff",
        "staged",
        "observers",
        "steps",
        "ordered",
        "facts",
        "threads",
        "scopes",
        "recomputed_edits",
        "recomputed_flag",
    }
)


@hookimpl
def amanda_driver_info() -> DriverInfo:
    """Describe the driver."""
    return DriverInfo(
        api=3,
        name="tensorflow",
        modules=("tensorflow",),
        namespaces=("tensorflow/*/eager", "tensorflow/*/function", "tensorflow/*/graph"),
        capabilities={
            # In graphs, layers are called while the graph is built and not when it runs.
            "eager": _CAPABILITIES | {"calls", "eager", "module_values", "scope_events"},
            "function": _CAPABILITIES | {"graph", "export", "module_values"},
            "graph": _CAPABILITIES | {"graph"},
        },
        vocabulary={**OP_TYPES, **BACKWARD_TYPES},
    )


@hookimpl
def amanda_preflight() -> Sequence[Finding]:
    """Look for problems of this environment that would make results wrong."""
    findings = INTERCEPTORS.findings()
    if any(finding.severity == "error" for finding in findings):
        return findings
    if LAST_MODULE in sys.modules:
        from amanda_driver_tf.tensorflow_internals import graph_checks

        findings += [
            Finding(
                "error",
                f"TensorFlow {VERSIONS.installed()} is not known: {problem}",
                VERSIONS.install_tried,
            )
            for problem in graph_checks.problems()
        ]
        findings += _foreign()
    return findings


def _foreign() -> list[Finding]:
    """Return findings about what other libraries put between a program and TensorFlow."""
    import tensorflow as tf

    from amanda_driver_tf.tensorflow_internals.modules import context

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
        findings.append(Finding("info", "tf.functions run eagerly: there are no graphs", fix))
    return findings


@hookimpl
def amanda_driver_status() -> DriverStatus:
    """Report which TensorFlow is installed, and which interceptor sees its operators."""
    return INTERCEPTORS.status()


@hookimpl
def amanda_framework_imported() -> None:
    """Install the recorder of gradients, since graphs may be built long before they run."""
    from amanda_driver_tf.graphs import recorder

    recorder.install()


@hookimpl
def amanda_attach(session: Session) -> Attachment | None:
    """Start intercepting in the calling thread; return None if TensorFlow is not imported."""
    # `tensorflow` is in sys.modules from the beginning of its import; its context is added late.
    if LAST_MODULE not in sys.modules:
        return None
    return INTERCEPTORS.attach(lambda: _attachment(session))


def _attachment(session: Session) -> TensorFlowAttachment:
    from amanda_driver_tf.attachment import TensorFlowAttachment

    return TensorFlowAttachment(session)


@hookimpl
def amanda_exported(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Export a model or a function of tensors; return None for what is not TensorFlow's."""
    if LAST_MODULE not in sys.modules or not callable(model):
        return None
    import tensorflow as tf

    from amanda_driver_tf.threads import STATE

    if not any(tf.is_tensor(one) for one in tf.nest.flatten((args, kwargs))):
        return None
    functions: Any = STATE.functions  # It is there while tools are applied.
    return functions.exported(model, args, kwargs)


@hookimpl
def amanda_prepare_context(context: OpContext) -> None:
    """Set the common keys of the context of a TensorFlow op."""
    if context.namespace.startswith("tensorflow/"):
        describe(context)
