"""Modules that run as one operator without gradients: `TransformerEncoder`, `MultiheadAttention`.

Owns when they run their operators one by one instead, for tools that look inside.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from torch import nn

from amanda_core.driver_kit import local_of
from amanda_driver_torch.threads.state import STATE

__all__ = ["COMPILED", "replacement"]


class _Compiled:
    """The state that Dynamo reads while it compiles: whether fused operators are taken apart."""

    is_split = False


#: Dynamo guards its attribute.
COMPILED = _Compiled()


def replacement(original: Callable[[], bool]) -> Callable[[], bool]:
    """Return `get_fastpath_enabled` as tools that look inside need it.

    Under them, modules of torch run their operators one by one.
    """

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        if torch.compiler.is_compiling():  # Dynamo evaluates it while tracing.
            return original() and not COMPILED.is_split
        attachment = STATE.attachment
        if attachment is None or not original() or not attachment.watching():
            return original()
        module = local_of(sys._getframe(1), "self")
        if not isinstance(module, nn.Module) or module.training:
            return True
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            return True
        return not attachment.session.splits(
            "The fused inference path of torch.nn.TransformerEncoder and MultiheadAttention"
        )

    return get_fastpath_enabled
