"""The array that a parameter is now.

Arrays are never written: what updates a parameter makes another one. It is in a variable of the
model, if its library has such, or it is what the program has passed last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from jax.core import Tracer

from amanda_core.driver_kit import Known
from amanda_driver_jax.arrays import argument, concrete, known
from amanda_driver_jax.jax_internals import JittedCall
from amanda_driver_jax.trace_keys import Traced

__all__ = ["CurrentArray", "CurrentArrays"]


class CurrentArray:
    """Returns the array that one parameter is now; None if it has died, or was never set."""

    def __init__(self) -> None:
        self._variable: Any = None
        self._array: Callable[[], Any] = lambda: None

    def __call__(self) -> Any:
        """Return the array."""
        return self._array() if self._variable is None else self._variable.get_raw_value()

    def is_in_variable(self, array: Any) -> bool:
        """Return True if a variable is known that has this array."""
        return self._variable is not None and self() is array

    def set(self, array: Any, variable: Any, weakly: bool = False) -> None:
        """Note the array that the parameter is now.

        Args:
            array: The array.
            variable: The variable that has it, and is asked for its array from now on; or None.
            weakly: Whether to hold the array weakly. It is not held if a variable has it.
        """
        self._variable = variable
        self._array = weakref.ref(array) if weakly else lambda: array


class CurrentArrays:
    """The current arrays of the parameters of one store.

    Args:
        variable_of: Gets an array and a frame. Returns the variable that has the array, among the
            arguments of the functions around the frame; None if none has it.
    """

    def __init__(self, variable_of: Callable[[Any, FrameType | None], Any]) -> None:
        self._variable_of = variable_of
        #: Owner of a weight -> what holds its array, while a tool needs it.
        self._arrays: weakref.WeakValueDictionary[str, CurrentArray] = weakref.WeakValueDictionary()
        #: Jitted function -> what tells its calls apart -> its arguments that are parameters.
        self._calls: Known[dict[Any, dict[int, weakref.ref[CurrentArray]]]] = Known()

    def of(self, owner: str, value: Any, frame: FrameType, is_named: bool) -> CurrentArray:
        """Return the holder of a parameter's current array, set to the array of `value` if known.

        The holder is made at the first call for an owner, and is kept as long as a caller has it.

        Args:
            owner: Key of the parameter: the label of its model and its name, such as
                ``Model:layers.0.kernel``.
            value: The parameter as the operator gets it: an array, or the tracer of an argument of
                a function that is being traced. Later calls of this function update the holder.
            frame: The frame of the operator. A variable that has the array is looked up in the
                arguments of this frame and of those around it.
            is_named: Whether a module runs, so that the holder is updated when its model runs with
                another array. If False, an array that is not such an argument is held weakly,
                because nobody notes that the program has replaced it.
        """
        found = self._arrays.setdefault(owner, CurrentArray())
        array, passed = known(value), argument(value)
        around = passed
        while around is not None:  # It may be an argument of functions around that one as well.
            traced, place = around
            traced.parameters[place] = weakref.ref(found)
            around = argument(concrete(traced.values[place]))
        if array is not None and not found.is_in_variable(array):
            found.set(
                array, self._variable_of(array, frame), weakly=passed is None and not is_named
            )
        return found

    def traced(self, call: JittedCall, traced: Traced) -> None:
        """Note which arguments of a function are parameters, after its trace."""
        if traced.parameters:
            signatures = self._calls.get(call.function)
            if signatures is None:
                self._calls.set(call.function, signatures := {})
            signatures[call.parsed()[0]] = traced.parameters

    def passed(self, call: JittedCall, frame: FrameType | None) -> None:
        """Note the parameters that a function gets in a call which is not traced again."""
        signatures = self._calls.get(call.function)
        if signatures is None:
            return
        signature, values = call.parsed()
        for place, holder in signatures.get(signature, {}).items():
            found, array = holder(), known(values[place])
            if found is not None and array is not None and not found.is_in_variable(array):
                found.set(array, self._variable_of(array, frame))

    def registered(self, owner: str, array: Any) -> None:
        """Note the array of a parameter in a model that runs for the first time.

        Args:
            owner: Key of the parameter, as for `of`. Without a holder for it, nothing is noted.
            array: The array. A tracer is ignored.
        """
        found = self._arrays.get(owner)
        array = concrete(array)
        if found is None or isinstance(array, Tracer) or found.is_in_variable(array):
            return
        found.set(array, None)
