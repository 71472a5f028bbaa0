"""The pluggy plugin of MXNet's driver, named by the entry point ``amanda.drivers``.

Owns the check for configurations of MXNet in which gradients are wrong. Uses MXNet only if it is
imported already.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from amanda_core.driver_kit import DeclaredHooks, Session
from amanda_core.interface import Attachment, Finding
from amanda_driver_mxnet.vocabulary import DECLARATIONS, describe


def _attachment() -> Callable[[Session], Attachment]:
    from amanda_driver_mxnet.attachment import MxnetAttachment

    return MxnetAttachment


def _problems() -> list[Finding]:
    right = os.environ.get("MXNET_MKLDNN_ENABLED") == "0"
    if right or os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        return []
    return [
        Finding(
            "error",
            "With oneDNN (MKLDNN) and its threaded engine, MXNet computes wrong gradients in "
            "programs with custom functions (autograd.Function, CustomOp), and tools insert such "
            "functions",
            "Start Python with MXNET_ENGINE_TYPE=NaiveEngine, as `amanda run` does. "
            "MXNET_MKLDNN_ENABLED=0 works, too, but then MXNet cannot train an LSTM",
        )
    ]


_HOOKS = DeclaredHooks(DECLARATIONS, describe, _attachment, _problems)

amanda_attach = _HOOKS.amanda_attach
amanda_driver_info = _HOOKS.amanda_driver_info
amanda_driver_status = _HOOKS.amanda_driver_status
amanda_preflight = _HOOKS.amanda_preflight
amanda_prepare_context = _HOOKS.amanda_prepare_context
