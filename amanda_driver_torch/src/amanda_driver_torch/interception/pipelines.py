"""Stages of pipelines (`torch.distributed.pipelining`): their check by tools, and the current
micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from amanda_core.driver_kit import replacing
from amanda_core.interface import AmandaError
from amanda_driver_torch.facts import FACTS
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.distributed import STAGES

__all__ = ["found"]

#: Methods by which schedules let a stage compute, each with the number of a micro-batch.
_COMPUTING = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
#: The method by which schedules begin with a stage, before anything is sent or received.
_BEGINNING = "clear_runtime_states"


def found() -> Iterator[tuple[Any, str, Any]]:
    """Yield what to replace so that stages are watched: owner, name and replacement."""
    stage = getattr(sys.modules[STAGES[0]], STAGES[1])
    for name in (_BEGINNING, *_COMPUTING):
        watched = _beginning if name == _BEGINNING else _computing
        for kind in stage.__mro__:
            if name in vars(kind):
                yield kind, name, watched(vars(kind)[name])
                break


@replacing
def _beginning(original: Callable[..., Any], stage: Any) -> Any:
    attachment = STATE.attachment
    if attachment is not None and attachment.watching():
        for tool in attachment.session.tools:
            tool.check_stage(stage.submod, FACTS)
    return original(stage)


@replacing
def _computing(original: Callable[..., Any], stage: Any, *args: Any, **kwargs: Any) -> Any:
    attachment = STATE.attachment
    number = next((one for one in (*args, *kwargs.values()) if type(one) is int), None)
    if attachment is None or number is None:
        return original(stage, *args, **kwargs)
    keys = {"stage": stage.stage_index, "micro_batch": number}
    before, STATE.chunk = STATE.chunk, keys
    # Routines of operators that were analysed before are called without the driver.
    for context in attachment.session.contexts():
        context.update(keys)
    try:
        return original(stage, *args, **kwargs)
    except RuntimeError as error:
        # A stage reports its inputs in place of what a tool refuses.
        if isinstance(error.__cause__, AmandaError):
            raise error.__cause__ from None
        raise
    finally:
        STATE.chunk = before
        for context in attachment.session.contexts():
            for key in keys:
                context.pop(key, None)
