"""The pluggy plugin of JAX's driver, named by the entry point ``amanda.drivers``.

Uses JAX only if it is imported already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amanda_core.driver_kit import DeclaredHooks, Session
from amanda_core.interface import Attachment, hookimpl
from amanda_driver_jax.vocabulary import DECLARATIONS, describe


def _attachment() -> Callable[[Session], Attachment]:
    from amanda_driver_jax.attachment import JaxAttachment

    return JaxAttachment


_HOOKS = DeclaredHooks(DECLARATIONS, describe, _attachment)

amanda_attach = _HOOKS.amanda_attach
amanda_driver_info = _HOOKS.amanda_driver_info
amanda_driver_status = _HOOKS.amanda_driver_status
amanda_preflight = _HOOKS.amanda_preflight
amanda_prepare_context = _HOOKS.amanda_prepare_context


@hookimpl
def amanda_exported(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Export a function or a model of arrays; return None for what is not JAX's."""
    if not _HOOKS.is_loaded() or not callable(model):
        return None
    import jax

    from amanda_driver_jax.trace_keys import LOCAL

    if not any(isinstance(one, jax.Array) for one in jax.tree.leaves((args, kwargs))):
        return None
    return LOCAL.hold.exported(model, args, kwargs)


@hookimpl
def amanda_framework_imported() -> None:
    """Add the key of trace caches: what is compiled before it exists is compiled again later."""
    if _HOOKS.is_loaded():
        import amanda_driver_jax.trace_keys  # noqa: F401  Importing it adds the key.
