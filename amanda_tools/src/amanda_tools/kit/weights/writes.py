"""`Watch`: sees the writes to weights for a tool that looks at some operators only."""

from __future__ import annotations

from typing import Any

from amanda_core import OpContext, Tool
from amanda_core.weights.state import WeightState

__all__ = ["Watch"]


class Watch(Tool):
    """Watches all operators for writes to weights, for the edited parameters of a `WeightState`.

    A tool that is restricted by ``where`` is not called for the other operators, which may write
    the weights. It depends on this tool: ``self.depends_on(Watch(self.state))``.

    Args:
        state: What the other tool keeps by weight.

    >>> state = WeightState()
    >>> tool = Tool()
    >>> tool.depends_on(Watch(state))
    """

    changes_values = False

    def __init__(self, state: WeightState[Any]) -> None:
        super().__init__()
        self._state = state
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        """Insert a routine that forgets edited parameters, if the op writes them uncounted."""
        self._state.watch(context)
