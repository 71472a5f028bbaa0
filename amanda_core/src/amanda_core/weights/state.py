"""`WeightState`: what a tool keeps for each weight, and its edited parameters.

Owns where masks, scales and ranges are kept, how they are saved, and when an edited parameter is
made again. The kept values belong to the tool and are not read here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from amanda_core.interface.driver import WatchedContext
from amanda_core.runtime.threads import WeakGroup
from amanda_core.weights.reads import Weight

__all__ = ["Memoized", "WeightState", "forget_all_edited"]

T = TypeVar("T")

_states: WeakGroup[WeightState[Any]] = WeakGroup()


def forget_all_edited() -> None:
    """Make all edited parameters again when next needed: writes may have been missed."""
    if _states.data:  # type: ignore[attr-defined]  # Faster than to go over none.
        for state in list(_states):
            state.forget_edited()


class Memoized:
    """A routine whose result a driver may use again, as `WeightState.memoized` makes it.

    A driver that cannot tell whether a value was written calls it each time.

    Args:
        routine: The routine. Its result must depend only on its argument and on what does not
            change while the stamp is the same.
        stamp: A list of one object, which is replaced when results may have changed.
        fresh: As in `WeightState.memoized`.
    """

    def __init__(
        self,
        routine: Callable[..., Any],
        stamp: list[object],
        fresh: Callable[[Any], Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, routine)
        self.routine, self.stamp, self.fresh = routine, stamp, fresh

    def __call__(self, *values: Any, **kwargs: Any) -> Any:
        """Call the routine."""
        return self.routine(*values, **kwargs)


class WeightState(Generic[T]):
    """Values that a tool keeps for each parameter, such as masks, scales or ranges.

    There is one value for each parameter, however many operators read it, and by whatever parts and
    names. Tied layers share it, and a fused projection has one for all its chunks.

    Args:
        by_region: Whether to keep a value for each part of a parameter that operators read, such as
            each expert, instead of one for the whole.

    >>> state = WeightState()
    >>> len(state)
    0
    """

    def __init__(self, by_region: bool = False) -> None:
        self._by_region = by_region
        self._kept: dict[str, T] = {}
        #: Owner -> the weight for which its value was made.
        self._made: dict[str, Weight] = {}
        #: Values from `load` by name, which no weight has claimed yet.
        self._loaded: dict[str, Any] = {}
        self._convert: Callable[[Any, Any], T] = _unchanged
        #: Owner -> version of the parameter, and the edited parameter.
        self._edited: dict[str, tuple[tuple[object, ...], Any]] = {}
        self._stamp: list[object] = [object()]
        _states.add(self)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def get(self, weight: Weight, make: Callable[[Any], T]) -> T | None:
        """Return what is kept for the parameter that a weight is a part of.

        Args:
            weight: The weight.
            make: Makes the value from the whole parameter, if nothing is kept yet.

        Returns:
            The kept value; None if the parameter has died.
        """
        owner = weight.key if self._by_region else weight.owner
        parameter, made = weight.parameter, self._made.get(owner)
        other = made is not None and made is not weight and parameter is not made.parameter
        if other and weight.memory and parameter is not None:
            del self._kept[owner], self._made[owner]  # Of a model that has died, or lost its name.
        if owner not in self._kept:
            if parameter is None:
                return None
            self._made[owner] = weight
            names = [n for n in (owner, owner.partition(":")[2]) if n in self._loaded]
            loaded = self._loaded[names[0]] if names else None
            self._kept[owner] = self._convert(loaded, parameter) if names else make(parameter)
        return self._kept[owner]

    def saved(self) -> dict[str, T]:
        """Return all kept values by the parameters' names and regions, to be written to a file.

        The name is that in the model's ``state_dict``. If several models have a parameter of one
        name, the model's name and a colon come before it.
        """
        names = [owner.partition(":")[2] for owner in self._kept]
        return {
            owner if names.count(name) > 1 else name: kept
            for name, (owner, kept) in zip(names, self._kept.items(), strict=True)
        }

    def load(
        self, saved: Mapping[str, Any], convert: Callable[[Any, Any], T] | None = None
    ) -> None:
        """Load what `saved` has returned. Each weight named there gets its value when it is read.

        Args:
            saved: The values by name.
            convert: Makes the kept value from a loaded one and the parameter, such as a tensor on
                the parameter's device from an array in a file. Without it, the loaded value is kept
                unchanged.
        """
        self._loaded, self._convert = dict(saved), convert or _unchanged
        self._kept.clear()
        self._made.clear()
        self.forget_edited()

    def edited(self, weight: Weight, edit: Callable[[Any], Any], keep: bool = True) -> Any:
        """Return the whole parameter as edited, made again only after the parameter was written.

        Args:
            weight: The weight that is read.
            edit: Makes the edited parameter from the parameter.
            keep: Whether it may be kept. It must not be if its gradient is needed.

        Returns:
            The edited parameter; None if the parameter has died.
        """
        parameter = weight.parameter
        if parameter is None:
            return None
        owner = weight.owner
        version = weight.version(parameter) if keep else None
        if version is None:
            return edit(parameter)
        kept = self._edited.get(owner)
        if kept is not None and kept[0] == version:
            return kept[1]
        if kept is not None and kept[0][0] != version[0]:
            self._edited.clear()  # They are of an earlier session.
        new = edit(parameter)
        # An inference tensor, whose writes are not counted, must not be kept.
        if weight.is_counted(new):
            self._edited[owner] = (version, new)
        return new

    def memoized(
        self, routine: Callable[..., Any], fresh: Callable[[Any], Any] | None = None
    ) -> Callable[..., Any]:
        """Return a routine that a driver need not call again until its weight is written.

        Use it for a routine that is inserted before an op at one position, and whose result depends
        only on the weight there and on this state, such as one that calls `edited`. Do not use it
        for a weight that `varies`.

        Args:
            routine: The routine.
            fresh: Computes the same from the value alone without looking it up, for a driver that
                finds that the weight was written.
        """
        return Memoized(routine, self._stamp, fresh)

    def forget_edited(self) -> None:
        """Make edited parameters again when they are next needed."""
        self._edited.clear()
        self._stamp[0] = object()

    def watch(self, context: WatchedContext) -> None:
        """Watch an op for writes to parameters that the framework does not count.

        A tool that uses `edited` must call this in its analysis routine, for every op.
        """
        reads, execution = context.weights, context.execution
        writes = execution.get("writes") or execution.get("destinations")
        # Outside of modules, an op of a loop may write one tensor now and another one later.
        if reads.uncounted or (writes and not reads.root and context.zone == "model"):
            context.insert_after_op(self._written, observe=True, outputs=[], context=context)

    def _written(self, context: WatchedContext) -> None:
        for owner in context.weights.uncounted:
            self._edited.pop(owner, None)
            self._stamp[0] = object()


def _unchanged(loaded: Any, parameter: Any) -> Any:
    return loaded
