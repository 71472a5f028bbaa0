"""How tensors that a tool learns reach the optimizer of a program that does not know the tool."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from amanda_core.errors import AmandaWarning

__all__ = ["join_optimizers"]


def join_optimizers(
    tensors: Callable[[], list[Any]], weights: Callable[[], Iterable[Any]], where: str
) -> Callable[[], None]:
    """Add learned tensors to the optimizer that has a model's weights, before it makes a step.

    They go into its first group, so that schedules of learning rates hold for them as well.

    Args:
        tensors: Returns those that the program has not taken; a weakly held bound method.
        weights: Returns the weights that the tool works on; likewise.
        where: Name of the tool, for the notice.

    Returns:
        A function that ends this.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    tensors_ref, weights_ref = weakref.WeakMethod(tensors), weakref.WeakMethod(weights)

    def join(optimizer: Any, args: Any, kwargs: Any) -> None:
        taken, wanted = tensors_ref(), weights_ref()
        if taken is None or wanted is None:
            return
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        new = [one for one in taken() if id(one) not in held]
        if not new or held.isdisjoint(id(one) for one in wanted()):
            return
        group = optimizer.param_groups[0]
        group["params"].extend(new)
        rate, decay = group.get("lr"), group.get("weight_decay")
        warnings.warn(
            f"{where}: {len(new)} learned tensors were added to the first group of "
            f"{type(optimizer).__name__} (lr {rate}, weight decay {decay}). Call parameters() to "
            "give them to an optimizer yourself",
            AmandaWarning,
            stacklevel=3,
        )

    return register_optimizer_step_pre_hook(join).remove
