"""`WeightTool`: the base of tools that keep tensors for each weight, such as masks or scales.

Owns how such a tool is resumed in another process, and removed. What is kept, and what it means,
belongs to the subclasses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amanda_core import OpContext
from amanda_core.errors import ResultError
from amanda_core.weights.reads import Reads, Weight
from amanda_core.weights.state import WeightState
from amanda_tools.kit.tensors.values import UNKNOWN, host, numbers
from amanda_tools.kit.weights.baking import Edit
from amanda_tools.kit.weights.baking_tool import BakingTool
from amanda_tools.kit.weights.files import load_weights, save_weights

__all__ = ["Edit", "WeightTool"]


class WeightTool(BakingTool):
    """A tool that keeps tensors for each weight.

    A subclass fills `states`, and begins its analysis routine with
    ``if not self.meets(context): return``. Where it makes what it keeps for a weight, it asks
    `claimed` first.

    Attributes:
        states: What is kept by weight, by a name that begins the keys of `state_dict`.
        by_op: NumPy arrays that are kept by operator, where weights are not known.
        arrays: All NumPy arrays that are kept beside `states`, by name and key. They are saved and
            loaded with the rest.
        removed: Whether `remove` was called.

    >>> class Halves(WeightTool):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.states["factor"] = WeightState()
    ...         self.add_inst_for_op(self.analyse)
    ...
    ...     def analyse(self, context):
    ...         if not self.meets(context) or not context.weights.consumed:
    ...             return
    ...         for position, weight in context.weights.items():
    ...             context.insert_before_op(self.edit, inputs=[position], weight=weight)
    ...
    ...     def edit(self, value, weight):
    ...         return value * self.states["factor"].get(weight, lambda: 0.5)
    >>> sorted(Halves().state_dict())
    ['options', 'parameters', 'progress', 'tool']
    """

    #: Names of the options that a resumed tool must have as well.
    saved: tuple[str, ...] = ()
    changes_values = True

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, WeightState[Any]] = {}
        self.by_op: dict[str, Any] = {}
        self.arrays: dict[str, dict[str, Any]] = {"op": self.by_op}
        self.removed = False
        #: Root -> name -> shape of each parameter of the models that ran.
        self._models: dict[str, dict[str, list[int]]] = {}
        #: The same of the models of a loaded state; None if none was loaded.
        self._expected: dict[str, dict[str, list[int]]] | None = None
        self._loaded: dict[str, Any] = {}
        #: Whether what processes keep in parts is read as a whole, which communicates.
        self._gathers = False

    # For subclasses.

    def options(self) -> dict[str, Any]:
        """Return the options that a resumed tool must have as well, as JSON."""
        return {name: getattr(self, name) for name in self.saved}

    def progress(self) -> dict[str, Any]:
        """Return what changes with the steps, such as their number, as JSON."""
        return {}

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Continue from the result of `progress`."""

    def check_kept(self, name: str, kept: Any, shape: tuple[int, ...]) -> str:
        """Return why an array cannot be loaded for a parameter, or an empty string.

        Args:
            name: Key of `states`, such as ``mask``.
            kept: The array that was saved.
            shape: The shape of the parameter.
        """
        return ""

    def meets(self, context: OpContext) -> bool:
        """Note the weights that an op reads; return False if the tool was removed.

        Raises:
            ResultError: A loaded state is of a model with other parameters.
        """
        for weight in self.note_weights(context):
            self._note_model(weight, context.weights)
        return not self.removed

    def claimed(self, name: str, weight: Weight) -> Any:
        """Return the loaded array that is kept for a weight in ``states[name]``, or None."""
        for key in (weight.owner, weight.owner.partition(":")[2]):
            kept = self._loaded.pop(f"{name}/{key}", None)
            if kept is not None:
                return kept
        return None

    # For users.

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to continue in another process: NumPy arrays and JSON values.

        Keys such as ``mask/conv1.weight`` hold arrays.

        Raises:
            NotReadableError: A tensor does not have a plain array of values.
        """
        arrays = {
            f"{name}/{key}": self.array(owner, kept)
            for name, state in self.states.items()
            for owner, (key, kept) in zip(state, state.saved().items(), strict=True)
        }
        return {
            "tool": type(self).__name__,
            "options": self.options(),
            "progress": self.progress(),
            "parameters": self._models or self._expected or {},
            **{
                f"{name}/{key}": array
                for name, kept in self.arrays.items()
                for key, array in kept.items()
            },
            **self._loaded,  # Not yet read in this process.
            **arrays,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; call it before the first step.

        Its names and shapes are compared with those of a model when this first runs.

        Raises:
            ResultError: It is not a state of such a tool with these options, or an array in it has
                a wrong shape or name.
        """
        own = {"tool": type(self).__name__, "options": self.options()}
        for key, value in own.items():
            if state.get(key) != value:
                raise ResultError(
                    f"The state is of {key} {state.get(key)!r}, but this tool has {value!r}",
                    where=self.tool_name,
                    fix="Create the tool with the options that it was saved with",
                )
        parts = {key: state.get(key) for key in ("parameters", "progress")}
        if not all(isinstance(part, dict) for part in parts.values()):
            raise ResultError("The state has no parameters", fix="Give one that state_dict made")
        shapes = {
            name: tuple(shape)
            for root, model in state["parameters"].items()
            for bare, shape in model.items()
            for name in (bare, f"{root}:{bare}")
        }
        arrays = {key: value for key, value in state.items() if key not in (*own, *parts)}
        for name, kept in self.arrays.items():
            keys = [key for key in arrays if key.startswith(f"{name}/")]
            kept.clear()
            kept.update({key.partition("/")[2]: arrays.pop(key) for key in keys})
        for key, value in arrays.items():
            name, _, parameter = key.partition("/")
            why = "" if name in self.states else f"the tool keeps no {name!r}"
            if not why and parameter.partition("[")[0] not in shapes:
                why = "no such parameter is listed"
            why = why or self.check_kept(name, value, shapes[parameter.partition("[")[0]])
            if why:
                raise ResultError(f"{key} in the state: {why}", fix="Give the state as it was made")
        for state_by_weight in self.states.values():
            state_by_weight.load({})
        self._expected, self._loaded = state["parameters"], arrays
        self._met.clear()
        self._models.clear()
        self.removed = False
        self.resume(state["progress"])
        self.invalidate()

    def save(self, path: Path | str) -> Path:
        """Write the `state_dict` to a ``.safetensors`` file, which holds the rest as JSON."""
        return save_weights(self.state_dict(), path)

    def load(self, path: Path | str) -> None:
        """Call `load_state_dict` with the content of a file that `save` wrote."""
        self.load_state_dict(load_weights(path))

    def write_kept(self, folder: Path | None) -> tuple[list[Path], dict[str, Any]]:
        """Write masks or scales."""
        name = "state.safetensors"
        about = {"options": self.options(), "state": name, "by_operator": sorted(self.by_op)}
        self._gathers = True
        try:
            state = self.state_dict()
        finally:
            self._gathers = False
        return [save_weights(state, folder / name)] if folder is not None else [], about

    def remove(self) -> None:
        """Stop: from now on every weight is used as it is. Parameters were never changed."""
        self.removed = True
        for state in self.states.values():
            state.load({})
        for arrays in self.arrays.values():
            arrays.clear()
        self.invalidate()

    def array(self, owner: str, kept: Any) -> Any:
        """Return what is kept for a weight, as a NumPy array if it is a tensor."""
        met = self._met.get(owner.partition("[")[0])
        facts = met[1] if met else UNKNOWN
        if not facts.is_tensor(kept):
            return kept
        tensor = host(facts, facts.whole(kept) if self._gathers else kept)
        return numbers(tensor.array, tensor.dtype)

    def _note_model(self, weight: Weight, reads: Reads) -> None:
        known = self._models.get(weight.root, {}).get(weight.owner.partition(":")[2])
        if known == list(weight.shape):
            return  # With all parameters of its model: listing them at each would be quadratic.
        shapes = {key: list(shape) for key, shape in reads.shapes().items()}
        shapes.setdefault(weight.owner, list(weight.shape))
        for owner, shape in shapes.items():
            root, _, name = owner.partition(":")
            self._models.setdefault(root, {})[name] = shape
        if self._expected is not None:
            self._compare(weight.root)

    def _compare(self, root: str) -> None:
        """Raise an error unless the loaded state has a model with the parameters of this one."""
        expected, found = self._expected or {}, self._models[root]
        if found in expected.values() or _is_part(found, expected.get(root)):
            return
        other = expected.get(root) or next(iter(expected.values()), {})
        names = [name for name in {**other, **found} if other.get(name) != found.get(name)]
        name = names[0] if names else "?"
        saved, own = other.get(name), found.get(name)
        raise ResultError(
            f"The loaded state does not fit the model: {name} "
            + (f"has shape {own} here" if own else "is not in it")
            + (f", and {saved} in the state" if saved else ", and is not in the state"),
            where=self.tool_name,
            fix="Load the state into the model that it was saved for",
        )


def _is_part(found: Mapping[str, list[int]], expected: Mapping[str, list[int]] | None) -> bool:
    """Return True for parameters outside of modules, of which only some may have been read."""
    return expected is not None and all(expected.get(n) == shape for n, shape in found.items())
