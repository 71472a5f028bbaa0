"""The learned steps of a tool: made, resumed, and given to an optimizer.

Owns which steps there are. The rules are those of `learned`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from amanda_core import Tool
from amanda_tools.kit.weights.learned_parameters import OptimizerJoin
from amanda_tools.quantize.formats import Format
from amanda_tools.quantize.learned import Step

__all__ = ["Steps"]


class Steps:
    """Steps by key: ``weight/`` and a parameter's owner, or an operator's name and a role.

    Args:
        rule: The rule of all steps.
        loaded: Arrays of an earlier process, from which steps are taken, and to which `export`
            writes.
        tool: The tool.
        weights: Returns the parameters of the model, whose optimizer gets the steps.

    Attributes:
        optimizers: How the steps reach an optimizer.
    """

    def __init__(
        self,
        rule: str,
        loaded: dict[str, Any],
        tool: Tool,
        weights: Callable[[], Iterable[Any]],
    ) -> None:
        self._rule, self._loaded = rule, loaded
        self._made: dict[str, Step] = {}
        self.optimizers = OptimizerJoin(tool, self.parameters, weights)

    def get(self, key: str) -> Step | None:
        """Return the step with a key, or None."""
        return self._made.get(key)

    def make(
        self, key: str, form: Format, values: Any, axes: tuple[int, ...], is_weight: bool
    ) -> Step:
        """Return the step with a key, made of present values unless an earlier process had it."""
        if key not in self._made:
            names = ("size", "offset", "facts")
            loaded = {
                name: self._loaded.pop(f"{key}#{name}")
                for name in names
                if f"{key}#{name}" in self._loaded
            }
            self._made[key] = (
                Step.of(self._rule, loaded, values)
                if loaded
                else Step(self._rule, form, values, axes, is_weight)
            )
            self.optimizers.begin()
        return self._made[key]

    def parameters(self) -> list[Any]:
        """Return all learned tensors, those of weights first."""
        keys = sorted(self._made, key=lambda key: not key.startswith("weight/"))
        return [parameter for key in keys for parameter in self._made[key].parameters]

    def export(self) -> None:
        """Write all steps to the arrays of which another process makes them."""
        for key, step in self._made.items():
            for name, array in step.arrays().items():
                self._loaded[f"{key}#{name}"] = array

    def clear(self) -> None:
        """Forget all steps."""
        self._made.clear()
