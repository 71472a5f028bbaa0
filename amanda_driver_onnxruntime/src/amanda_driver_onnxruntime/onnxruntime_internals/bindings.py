"""`Binding` and value vectors: where a program wants the results of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxruntime import IOBinding, OrtDevice

__all__ = ["Binding", "append"]


def append(vector: Any, values: Sequence[Any]) -> None:
    """Append values to a vector of ONNX Runtime."""
    for value in values:
        vector.push_back(value._ortvalue)


class Binding:
    """The values that a program bound to the inputs and outputs of a session.

    Attributes:
        binding: ONNX Runtime's object.
        names: The names of the outputs.

    Args:
        binding: The object.
        devices: Name of an output -> the type and number of the device on which ONNX Runtime
            allocates it.
    """

    def __init__(self, binding: IOBinding, devices: Mapping[str, tuple[str, int]]) -> None:
        self.binding: Any = binding
        self._outputs: dict[str, Any] = dict(getattr(binding, "_bound_outputs", {}))
        self._devices = dict(devices)
        self.names = list(self._outputs)

    def inputs(self) -> dict[str, Any] | None:
        """Return the values of the inputs; None if not all that is bound is known.

        An address cannot be read back, and releases before 1.30 do not tell what is bound.
        """
        bound, outputs = getattr(self.binding, "_bound_inputs", None), self._outputs.items()
        if bound is None or any(one is None and n not in self._devices for n, one in outputs):
            return None
        arrays, found = self.binding._numpy_obj_references, {}
        for name, value in bound.items():
            value = arrays.get(name) if value is None else value
            if value is None:
                return None
            found[name] = value
        return found

    def give(self, values: Sequence[Any]) -> None:
        """Let the program find these values where it has bound the outputs."""
        for name, value in zip(self.names, values, strict=True):
            bound = self._outputs[name]
            if bound is None:
                self.binding._iobinding.bind_ortvalue_output(name, value._ortvalue)
            else:
                bound.update_inplace(value)

    def restore(self) -> None:
        """Bind the outputs again as the program did, for a run without tools."""
        for name, bound in self._outputs.items():
            if bound is None and self.binding._bound_outputs.get(name, self) is None:
                device = OrtDevice.make(*self._devices[name])._get_c_device()
                self.binding._iobinding.bind_output(name, device)
