"""How tensors that a tool learns reach the optimizer of a program that does not know the tool."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from amanda_core import Tool
from amanda_core.errors import AmandaWarning

__all__ = ["OptimizerJoin"]


class OptimizerJoin:
    """Adds learned tensors to the optimizer that has a model's weights, before it makes a step.

    They go into its first group, so that schedules of learning rates hold for them as well. It
    watches optimizers only while the tool is applied.

    Args:
        tool: The tool that learns them.
        learned: Returns the learned tensors.
        weights: Returns the weights that the tool works on.

    >>> tool, scales, weights = Tool(), [], []
    >>> join = OptimizerJoin(tool, learned=lambda: scales, weights=lambda: weights)
    >>> join.taken
    False
    """

    def __init__(
        self,
        tool: Tool,
        learned: Callable[[], list[Any]],
        weights: Callable[[], Iterable[Any]],
    ) -> None:
        self._tool, self._learned, self._weights = tool, learned, weights
        self._unhook: Callable[[], None] | None = None
        #: Whether the program gives the tensors to an optimizer itself.
        self.taken = False
        tool.add_inst_for_step(begin=self.begin)
        tool.add_inst_for_end(self.end)

    def begin(self, step: int = 0) -> None:
        """Watch the steps of optimizers, once there is something to add."""
        if self._unhook is None and self._learned():
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            self._unhook = register_optimizer_step_pre_hook(self._join).remove

    def end(self) -> None:
        """Watch no longer."""
        if self._unhook is not None:
            self._unhook()
            self._unhook = None

    def _join(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        new = [] if self.taken else [one for one in self._learned() if id(one) not in held]
        if not new or held.isdisjoint(id(one) for one in self._weights()):
            return
        group = optimizer.param_groups[0]
        group["params"].extend(new)
        rate, decay = group.get("lr"), group.get("weight_decay")
        warnings.warn(
            f"{self._tool.tool_name}: {len(new)} learned tensors were added to the first group of "
            f"{type(optimizer).__name__} (lr {rate}, weight decay {decay}). Call parameters() to "
            "give them to an optimizer yourself",
            AmandaWarning,
            stacklevel=3,
        )
