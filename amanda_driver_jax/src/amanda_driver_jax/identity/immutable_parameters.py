"""Weights in arrays that are never written: an input is a parameter, or it is not.

Owns how the parameters that an operator reads are found by identity. The core finds them by memory
(`amanda_core.weights.parameters`), for frameworks in which views share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amanda_core.driver_kit import Found, OpContext, Place, Reads, Weight
from amanda_driver_jax.arrays import Shown, sources_of
from amanda_driver_jax.identity.parameter_index import ParameterIndex

__all__ = ["ImmutableParameters"]

#: Operators that pass a parameter on; the one that computes with the result reads it as well.
_COPIES = ("cast", "identity", "reshape", "slice", "squeeze", "transpose")


class ImmutableParameters:
    """Finds the parameters that operators read.

    Args:
        source: Returns the array that an input shows.
        current: Returns what returns the array that a parameter is now, given its owner and the
            array or the argument of a traced function that it is here.
        varies: Whether an operator may read other parameters in other executions.
    """

    def __init__(
        self,
        source: Callable[[Any], Shown],
        current: Callable[[str, Any], Callable[[], Any]],
        varies: bool,
    ) -> None:
        self._origin_of, self._current, self._varies = source, current, varies

    def reads(
        self,
        context: OpContext,
        root: str,
        index: ParameterIndex,
        classes: Mapping[str, str],
    ) -> Reads:
        """Return the parameters that an operator reads in this execution.

        Args:
            context: The context of the operator, during a call of a routine.
            root: The label of the model that runs; empty outside of models.
            index: The model's parameters.
            classes: The names of the classes of its modules, by their paths.
        """
        finder: Any = self  # It answers what `Weight` asks.
        names, shapes = index.names, index.shapes(root)
        roles: tuple[str, ...] = context.get("input_roles", ())
        found: dict[int | tuple[int, int], Weight] = {}
        computed: set[str] = set()
        for position, value in enumerate(context.get_inputs() or ()):
            seen = self._origin_of(value)
            name = names.get(id(seen.source))
            if name is None:
                made_of = sources_of(value) if position < len(roles) else ()
                if made_of and all(id(array) in names for array in made_of):
                    computed.update(f"{root}:{names[id(array)]}" for array in made_of)
                continue
            shape = shapes[f"{root}:{name}"]
            place = Place(_region(seen.places, shape), seen.exact, seen.axes)
            get = self._current(f"{root}:{name}", seen.source)
            role = roles[position] if position < len(roles) else None
            part = Found(root, name, 0, shape, None, place, get)
            found[position] = Weight(part, value, finder, role, self._varies)
        consumed = bool(found) and context["type"] not in _COPIES
        return Reads(
            found,
            lambda: shapes,
            consumed,
            root=root,
            classes=lambda: dict(classes),
            class_at=classes.get,
            computed=computed,
        )

    def memory(self, value: Any) -> None:
        """Return None, because arrays share no memory with others."""

    def version(self, parameter: Any) -> None:
        """Return None, because parameters are replaced and never written."""

    def counts_writes(self, value: Any, parameter: Any) -> bool:
        """Return False, because parameters are replaced and never written."""
        return False


def _region(
    places: Sequence[int | range], shape: tuple[int, ...]
) -> tuple[int | slice[Any, Any, Any], ...]:
    """Return indices into a parameter of a shape; empty for all of it."""
    found: list[int | slice[Any, Any, Any]] = [
        place
        if isinstance(place, int)
        else slice(None)
        if place == range(size)
        else slice(place.start, place.stop, None if place.step == 1 else place.step)
        for place, size in zip(places, shape, strict=True)
    ]
    while found and found[-1] == slice(None):
        found.pop()
    return tuple(found)
