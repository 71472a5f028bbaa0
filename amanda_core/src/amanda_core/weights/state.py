"""`WeightState`: what a tool knows by weight, and parameters as a tool has edited them.

Owns where masks, scales and ranges are kept, how they are saved, and when an edited parameter is
made again. What is kept is the tool's: no value is read here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from amanda_core.weights.reads import Weight

if TYPE_CHECKING:
    from amanda_core.context import OpContext

__all__ = ["Memoized", "WeightState", "forget_all_edited"]

T = TypeVar("T")

_states: weakref.WeakSet[WeightState[Any]] = weakref.WeakSet()


def forget_all_edited() -> None:
    """Make all edited parameters again when they are needed next: writes may have been missed."""
    for state in list(_states):
        state.forget_edited()


class Memoized:
    """A routine whose result a driver may use again, as `WeightState.memoized` makes it.

    A driver that cannot tell whether a value was written calls it each time.

    Args:
        routine: The routine. Its result depends on the value that it is given, and on nothing that
            changes while the stamp stays.
        stamp: A list of one object, another one once results may have changed.
    """

    def __init__(self, routine: Callable[..., Any], stamp: list[object]) -> None:
        functools.update_wrapper(self, routine)
        self.routine, self.stamp = routine, stamp

    def __call__(self, *values: Any, **kwargs: Any) -> Any:
        """Call the routine."""
        return self.routine(*values, **kwargs)


class WeightState(Generic[T]):
    """What a tool keeps for each parameter: a mask, a scale, a range.

    There is one for each parameter, however many operators read it and by whatever parts and names:
    tied layers share it, a fused projection has one for all its chunks.

    >>> state = WeightState()
    >>> len(state)
    0
    """

    def __init__(self) -> None:
        self._kept: dict[str, T] = {}
        #: Values by name that no weight has claimed yet, as `load` gave them.
        self._loaded: dict[str, T] = {}
        #: Owner -> version of the parameter, and what was made of it.
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
            make: Makes it of the whole parameter, where nothing is kept yet.

        Returns:
            What is kept; None where the parameter is gone.
        """
        owner = weight.owner
        if owner not in self._kept:
            if weight.name in self._loaded or owner in self._loaded:
                loaded = self._loaded
                self._kept[owner] = loaded[owner] if owner in loaded else loaded[weight.name]
                return self._kept[owner]
            parameter = weight.parameter
            if parameter is None:
                return None
            self._kept[owner] = make(parameter)
        return self._kept[owner]

    def saved(self) -> dict[str, T]:
        """Return all that is kept by the parameters' names, to be written to a file.

        The name is that in the model's ``state_dict``; where several models have been run that
        hold a parameter of one name, the model stands before it, with a colon.
        """
        names = [owner.partition(":")[2] for owner in self._kept]
        return {
            owner if names.count(name) > 1 else name: kept
            for name, (owner, kept) in zip(names, self._kept.items(), strict=True)
        }

    def load(self, saved: Mapping[str, T]) -> None:
        """Take what `saved` returned. A weight of that name gets it instead of one that is made."""
        self._loaded = dict(saved)
        self._kept.clear()
        self.forget_edited()

    def edited(self, weight: Weight, edit: Callable[[Any], Any], keep: bool = True) -> Any:
        """Return the whole parameter as edited, made again only after the parameter was written.

        Args:
            weight: The weight that is read.
            edit: Makes the edited parameter of the parameter.
            keep: Whether it may be kept. Not if its gradient is needed.

        Returns:
            The edited parameter; None where the parameter is gone.
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
            self._edited.clear()  # Of an earlier session.
        new = edit(parameter)
        # What cannot be counted itself was made where nothing may be kept (inference tensors).
        if weight.version(new) is not None:
            self._edited[owner] = (version, new)
        return new

    def memoized(self, routine: Callable[..., Any]) -> Callable[..., Any]:
        """Return a routine that a driver need not call while nobody writes the weight it is given.

        For a routine inserted before an op, at one position, whose result depends on the weight
        there and on this state alone, such as one that calls `edited`. Not for a weight that
        `varies`.
        """
        return Memoized(routine, self._stamp)

    def forget_edited(self) -> None:
        """Make edited parameters again when they are needed next."""
        self._edited.clear()
        self._stamp[0] = object()

    def watch(self, context: OpContext) -> None:
        """Watch an op for writes to parameters that the framework does not count.

        For the analysis routine of a tool that uses `edited`, to be called for every op.
        """
        owners = context.weights.uncounted
        if owners:
            context.insert_after_op(self._written, observe=True, owners=owners)

    def _written(self, *_: object, owners: frozenset[str]) -> None:
        for owner in owners:
            self._edited.pop(owner, None)
        self._stamp[0] = object()
