"""The pluggy plugin of JAX's driver, named by the entry point ``amanda.drivers``.

Uses JAX only if it is imported already.
"""

from __future__ import annotations

from collections.abc import Callable

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
def amanda_framework_imported() -> None:
    """Add the key of trace caches: what is compiled before it exists is compiled again later."""
    if _HOOKS.is_loaded():
        import amanda_driver_jax.trace_keys  # noqa: F401  Importing it adds the key.
