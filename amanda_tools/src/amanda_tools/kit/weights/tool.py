"""`WeightTool`: the base of tools that keep tensors for each weight, such as masks or scales.

Owns how such a tool is resumed in another process, removed, and baked into the parameters. What is
kept, and what it means, belongs to the subclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from amanda_core import OpContext, Tool
from amanda_core.engine.activation import disabled
from amanda_core.errors import ResultError, ToolError
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_core.weights.reads import Reads, Weight
from amanda_core.weights.state import WeightState
from amanda_tools.kit.output.extras import require
from amanda_tools.kit.output.folders import create_folder
from amanda_tools.kit.tensors.values import UNKNOWN, facts_of, host, numbers
from amanda_tools.kit.weights.baking import Baked, BakedModel, Edit, model_of, write_models
from amanda_tools.kit.weights.coverage import UnreachedWeight, list_weights
from amanda_tools.kit.weights.files import load_weights, save_weights

__all__ = ["Edit", "WeightTool"]


class WeightTool(Tool):
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
    whole = True
    changes_values = True
    #: The folder in which `amanda run` saves the weights at the end: the option ``save`` of the
    #: tools that can bake, which alone have this attribute.
    saves_to: str | None
    #: What results call the weights that operators read, and those of the program.
    words: ClassVar[tuple[str, str]] = ("changed", "unchanged")

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, WeightState[Any]] = {}
        self.by_op: dict[str, Any] = {}
        self.arrays: dict[str, dict[str, Any]] = {"op": self.by_op}
        self.removed = False
        #: Owner -> the weight, and the facts about tensors of its framework.
        self._met: dict[str, tuple[Weight, Facts]] = {}
        #: Root -> name -> shape of each parameter of the models that ran.
        self._models: dict[str, dict[str, list[int]]] = {}
        #: The same of the models of a loaded state; None if none was loaded.
        self._expected: dict[str, dict[str, list[int]]] | None = None
        self._loaded: dict[str, Any] = {}
        #: Returns the model of a root; None if it has died.
        self._model: Callable[[str], Any] = lambda root: None
        #: The models that must live until their weights are saved.
        self._held: list[Any] = []
        if type(self).baked is not WeightTool.baked:
            self.saves_to = None

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
        """Return why an array cannot be loaded for a parameter of a shape, or an empty string."""
        return ""

    def baked(self, weight: Weight) -> Edit | None:
        """Return the function to be written into a parameter, ``values -> values``, or None."""
        return None

    def read_otherwise(self) -> list[UnreachedWeight]:
        """Return the weights that are changed where they are read, but not everywhere."""
        return []

    def meets(self, context: OpContext) -> bool:
        """Note the weights that an op reads; return False if the tool was removed.

        Raises:
            ResultError: A loaded state is of a model with other parameters.
        """
        reads = context.weights
        for weight in reads.values():
            if weight.owner not in self._met:
                self._met[weight.owner] = weight, facts_of(context)
                self._note_model(weight, reads)
                self._model = reads.model
                if getattr(self, "saves_to", None) is not None:
                    self._held.append(reads.model(weight.root))
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

    def remove(self) -> None:
        """Stop: from now on every weight is used as it is. Parameters were never changed."""
        self.removed = True
        for state in self.states.values():
            state.load({})
        for arrays in self.arrays.values():
            arrays.clear()
        self.invalidate()

    def bake(self, model: Any = None) -> list[str]:
        """Write what the model runs with into its parameters, and return their names.

        Afterwards the model computes the same without the tool, and so does what is saved of it.

        Args:
            model: The model; without it, all models that ran.

        Raises:
            ToolError: Parameters of this framework cannot be written in place, or a parameter is
                also read unchanged, as that of an embedding may be which is tied to a product.
                Or the model has none that the tool changes, such as one that has not yet run.
        """
        chosen = None if model is None else {id(one) for one in model_of(model)}
        names = []
        with disabled():
            for weight, facts, edit in self._baked("bake"):
                parameter = weight.parameter
                if (
                    edit is None
                    or parameter is None
                    or not (chosen is None or id(parameter) in chosen)
                ):
                    continue
                try:
                    facts.update(parameter, edit)
                except NotReadableError as error:
                    raise ToolError(
                        f"{weight.name} cannot be written: {error}",
                        where=f"{self.tool_name}.bake",
                        fix="Apply the tool wherever the model runs, or multiply by state_dict()",
                    ) from error
                names.append(weight.name)
        if chosen is not None and not names:
            raise ToolError(
                f"This {type(model).__name__} has no weights that the tool has changed",
                where=f"{self.tool_name}.bake",
                fix="Run the model once under the tool before",
            )
        return names

    @property
    def has_baked(self) -> bool:
        """Whether the tool has changed weights that can be baked."""
        return any(self.baked(weight) is not None for weight, _ in self._met.values())

    def save_baked(self, folder: Path | str) -> list[Path]:
        """Write the weights as operators read them, and return the files.

        Nothing needs Amanda to load them, and the model itself is not changed. With them is what
        the tool keeps, such as masks or scales, and ``weights.json`` tells what was changed.

        Args:
            folder: The folder, which is made if there is none.

        Raises:
            ToolError: No model ran, it is gone, its values cannot be read, or a parameter is also
                read unchanged.
            ImportError: NumPy or safetensors is not installed.
        """
        require("safetensors", "safetensors")
        by_root: dict[str, list[Baked]] = {}
        for one in self._baked("save_baked"):
            by_root.setdefault(one.weight.root, []).append(one)
        if not any(one.edit for some in by_root.values() for one in some):
            raise ToolError(
                "There are no weights that the tool has changed",
                where=f"{self.tool_name}.save_baked",
                fix="Run the model under the tool before",
            )
        with disabled():
            models = [
                BakedModel(root, self._model(root), some)
                for root, some in by_root.items()
                if any(one.edit for one in some)
            ]
        path = create_folder(folder)
        kept = self.save(path / "state.safetensors")
        about = {
            "tool": type(self).__name__,
            "options": self.options(),
            "state": kept.name,
            "by_operator": sorted(self.by_op),
        }
        return [*write_models(path, models, about), kept]

    def _baked(self, method: str) -> list[Baked]:
        """Return each weight that operators read, with the function to be written into it."""
        others = list_weights("The model also reads weights unchanged", self.read_otherwise())
        if others:
            raise ToolError(
                others[0],
                where=f"{self.tool_name}.{method}",
                fix="Change them wherever they are read, or untie them before the tool runs",
            )
        return [Baked(weight, facts, self.baked(weight)) for weight, facts in self._met.values()]

    def array(self, owner: str, kept: Any) -> Any:
        """Return what is kept for a weight, as a NumPy array if it is a tensor."""
        met = self._met.get(owner.partition("[")[0])
        facts = met[1] if met else UNKNOWN
        if not facts.is_tensor(kept):
            return kept
        tensor = host(facts, kept)
        return numbers(tensor.array, tensor.dtype)

    def _note_model(self, weight: Weight, reads: Reads) -> None:
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
