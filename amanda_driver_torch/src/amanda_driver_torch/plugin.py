"""The pluggy plugin of PyTorch's driver, named by the entry point ``amanda.drivers``.

Owns the driver's description and its hooks. Uses torch only if it is imported already.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from amanda_core.driver_kit import NATIVE, OpContext
from amanda_core.interface import (
    Attachment,
    ConfigError,
    DriverInfo,
    DriverStatus,
    Finding,
    hookimpl,
)
from amanda_driver_torch.interception.interceptor_choice import INTERCEPTORS
from amanda_driver_torch.torch_internals.versions import why_hooked_by_python
from amanda_driver_torch.torch_internals.wrapper_modules import WRAPPERS
from amanda_driver_torch.vocabulary import (
    BACKWARD_TYPES,
    COMMUNICATING,
    FUSED,
    OF_GRADIENTS,
    OP_TYPES,
    describe,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from amanda_core.driver_kit import Session
    from amanda_driver_torch.attachment.attachment import TorchAttachment

__all__ = [
    "amanda_attach",
    "amanda_driver_info",
    "amanda_driver_status",
    "amanda_exported",
    "amanda_preflight",
    "amanda_prepare_context",
]

#: Type of an operator whose parts are not seen -> what it is.
_OPAQUE = dict.fromkeys(("ScriptFunction", "ScriptMethod"), "TorchScript")
_CAPABILITIES = frozenset(
    {
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
        "scopes",
        "scope_events",
        "calls",
        "module_values",
        "recomputed_edits",
        "recomputed_flag",
        "threads",
    }
)
#: Those that operators inside transforms of functions do not have.
_OF_GRADIENTS = frozenset({"gradients", "aligned_gradients", "late_gradients", "replace_backward"})


@hookimpl
def amanda_driver_info() -> DriverInfo:
    """Describe the driver."""
    return DriverInfo(
        api=3,
        name="pytorch",
        modules=("torch",),
        namespaces=("pytorch/*/eager", "pytorch/*/compiled", "pytorch/*/transformed"),
        # What a graph cannot have runs eagerly, with all capabilities of that.
        capabilities={
            "eager": _CAPABILITIES | {"eager"},
            "compiled": _CAPABILITIES | {"graph", "staged", "export"},
            "transformed": _CAPABILITIES - _OF_GRADIENTS | {"eager", "staged"},
        },
        vocabulary={**OP_TYPES, **BACKWARD_TYPES},
        wrappers=WRAPPERS,
    )


@hookimpl
def amanda_preflight() -> Sequence[Finding]:
    """Look for problems of this environment that would make results wrong."""
    findings = [*INTERCEPTORS.findings(), *_hooks()]
    if "torch.nn.modules.module" not in sys.modules:
        return findings
    from amanda_driver_torch.interception.other_libraries import other_libraries

    return [*findings, *other_libraries()]


def _hooks() -> list[Finding]:
    """Say who registers hooks on backward nodes with the native interceptor."""
    status = INTERCEPTORS.status()
    if status.interceptor != NATIVE or status.version is None:
        return []
    try:
        why = why_hooked_by_python(status.version)
    except ConfigError as error:
        return [Finding("error", str(error))]
    who = f"by Python: {why}" if why else "by the extension, in PyTorch's graphs"
    return [Finding("info", f"Hooks on backward nodes are registered {who}.")]


@hookimpl
def amanda_driver_status() -> DriverStatus:
    """Report which torch is installed, and which interceptor sees its operators."""
    return INTERCEPTORS.status()


@hookimpl
def amanda_attach(session: Session) -> Attachment | None:
    """Start intercepting in the calling thread; return None if torch is not imported."""
    if "torch" not in sys.modules:
        return None
    return INTERCEPTORS.attach(lambda: _attachment(session))


def _attachment(session: Session) -> TorchAttachment:
    from amanda_driver_torch.attachment.attachment import TorchAttachment

    return TorchAttachment.of(session)


@hookimpl
def amanda_exported(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Export a module, or a function of tensors; return None for what is not PyTorch's."""
    torch = sys.modules.get("torch")
    if torch is None or not callable(model):
        return None
    if not isinstance(model, torch.nn.Module):
        from amanda_driver_torch.torch_internals.dynamo import tree_leaves

        if not any(isinstance(one, torch.Tensor) for one in tree_leaves((args, kwargs))):
            return None
    return _state()[0].attachment.exported(model, args, kwargs)


@hookimpl
def amanda_prepare_context(context: OpContext) -> None:
    """Set the common keys of the context of a PyTorch op."""
    site = context.site
    namespace = site.namespace
    if not namespace.startswith("pytorch/"):
        return
    describe(context, site.op_type)
    backward = context.is_backward()
    if site.op_type.startswith(OF_GRADIENTS if backward else COMMUNICATING):
        _describe_communication()(context)
    if site.op_type in FUSED:
        context["parts_not_seen"] = "fused inference; whole=True shows its operators"
    elif not backward and (kind := type(context.get_op()).__name__) in _OPAQUE:
        context["parts_not_seen"] = _OPAQUE[kind]
    state, in_compiled_callable = _state()
    if state.chunk is not None:
        context.update(state.chunk)
    if (
        state.not_compiled
        and namespace.endswith("/eager")
        and not backward
        and in_compiled_callable(state.not_compiled)
    ):
        context["not_compiled"] = True


@functools.cache
def _describe_communication() -> Callable[[Any], None]:
    """Import what knows of process groups late, and once for all ops."""
    from amanda_driver_torch.communication import describe_communication

    return describe_communication


@functools.cache
def _state() -> tuple[Any, Callable[[Any], bool]]:
    """Import the thread's state late, since torch may not be loaded, and once for all ops."""
    from amanda_driver_torch.identity.frames import in_compiled_callable
    from amanda_driver_torch.threads.state import STATE

    return STATE, in_compiled_callable
