"""The learned steps of a tool: made, resumed, and given to an optimizer.

Owns which steps there are. The rules are those of `learned`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from amanda_tools.learned_parameters import join_optimizers
from amanda_tools.quantize.formats import Format
from amanda_tools.quantize.learned import Step

__all__ = ["Steps"]


class Steps:
    """Steps by key: ``weight/`` and a parameter's owner, or an operator's name and a role.

    Args:
        rule: The rule of all steps.
        loaded: Arrays of an earlier process, from which steps are taken, and to which `export`
            writes.
        weights: Returns the parameters of the model, whose optimizer gets the steps.
        name: Name of the tool, for the notice.
    """

    def __init__(
        self,
        rule: str,
        loaded: dict[str, Any],
        weights: Callable[[], Iterable[Any]],
        name: Callable[[], str],
    ) -> None:
        self._rule, self._loaded, self._weights, self._name = rule, loaded, weights, name
        self._made: dict[str, Step] = {}
        #: Whether the program takes the steps itself.
        self.taken = False
        self._leave: Callable[[], None] | None = None

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
            if self._leave is None:
                self._leave = join_optimizers(self._untaken, self._weights, self._name())
            self._made[key] = (
                Step.of(self._rule, loaded, values)
                if loaded
                else Step(self._rule, form, values, axes, is_weight)
            )
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

    def leave(self) -> None:
        """End the additions to optimizers."""
        if self._leave is not None:
            self._leave()
            self._leave = None

    def _untaken(self) -> list[Any]:
        return [] if self.taken else self.parameters()
