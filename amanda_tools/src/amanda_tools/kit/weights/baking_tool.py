"""`BakingTool`: the base of tools that change weights where they are read, and can write them.

Owns which weights operators have read, and that a weight which cannot be written is refused. What
is written belongs to the subclasses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from amanda_core import OpContext, Tool
from amanda_core.engine.activation import disabled
from amanda_core.engine.selection import Selection
from amanda_core.errors import ToolError, UnsupportedError
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_core.weights.reads import Weight
from amanda_tools.kit.output.extras import require
from amanda_tools.kit.output.folders import create_folder
from amanda_tools.kit.tensors.values import facts_of
from amanda_tools.kit.weights.baking import (
    Baked,
    BakedModel,
    Edit,
    meet,
    model_of,
    on_whole,
    write_models,
)
from amanda_tools.kit.weights.coverage import UnreachedWeight, list_weights

__all__ = ["BakingTool"]

T = TypeVar("T", bound="BakingTool")


class BakingTool(Tool):
    """A tool that changes weights where operators read them, and can write what they read.

    Its analysis routine calls `note_weights`, and it overrides `baked`.

    >>> BakingTool().has_baked
    False
    """

    whole = True
    #: The folder in which `amanda run` saves the weights at the end: the option ``save`` of the
    #: tools that can bake, which alone have this attribute.
    saves_to: str | None
    #: What results call the weights that operators read, and those of the program.
    words: ClassVar[tuple[str, str]] = ("changed", "unchanged")
    #: Why the changes cannot be written as weights; empty if they can.
    cannot_bake = ""
    #: What a refusal says before the weights of `read_otherwise`.
    otherwise: ClassVar[str] = "The model also reads weights unchanged"

    def __init__(self) -> None:
        super().__init__()
        #: Owner -> the weight, and the facts about tensors of its framework.
        self._met: dict[str, tuple[Weight, Facts]] = {}
        #: Returns the model of a root; None if it has died.
        self._model: Callable[[str], Any] = lambda root: None
        #: The models that must live until their weights are saved.
        self._held: list[Any] = []
        #: Where in the folder of `saves_to` this process writes; None if another one does.
        self._place: str | None = ""
        #: Owner -> ids of the operators that this tool has analysed.
        self._own_ops: dict[str, set[int]] = {}
        #: What all operators read, if the tool is restricted to some.
        self._all_reads: _AllReads | None = None
        #: Whether the tool acts in some steps or calls only.
        self._in_phases = False
        if type(self).baked is not BakingTool.baked:
            self.saves_to = None

    # For subclasses.

    def baked(self, weight: Weight) -> Edit | None:
        """Return the function to be written into a parameter, ``values -> values``, or None."""
        return None

    def read_otherwise(self) -> list[UnreachedWeight]:
        """Return the weights that are changed where they are read, but not everywhere."""
        return []

    def write_kept(self, folder: Path | None) -> tuple[list[Path], dict[str, Any]]:
        """Write what the tool keeps beside the weights, and return the files and what they are.

        The folder is None where another process writes them.
        """
        return [], {}

    def note_weights(self, context: OpContext) -> list[Weight]:
        """Note the weights that an op reads, and return those that are new."""
        reads, new = context.weights, []
        for weight in reads.values():
            self._own_ops.setdefault(weight.owner, set()).add(context.get_op_id())
            if weight.owner not in self._met:
                self._met[weight.owner] = weight, facts_of(context)
                new.append(weight)
                self._model = reads.model
                if getattr(self, "saves_to", None) is not None:
                    model = reads.model(weight.root)
                    if not any(one is model for one in self._held):
                        self._place = _place_of(facts_of(context), model)
                    self._held.append(model)
        return new

    def refuse_baking(self, why: str) -> None:
        """Refuse to write the weights from now on, for a reason."""
        self.cannot_bake = self.cannot_bake or f"{self.tool_name} {why}: that is in no weight"

    # For users.

    def where(self: T, selection: Selection | None) -> T:
        """Restrict this tool as `Tool.where`; what acts in some steps or calls is not baked."""
        super().where(selection)
        if selection is not None and self._all_reads is None:
            self._all_reads = _AllReads()
            self.depends_on(self._all_reads)  # It is not restricted.
        self._in_phases = selection is not None and bool(selection.phase(0))
        return self

    def bake(self, model: Any = None) -> list[str]:
        """Write what the model runs with into its parameters, and return their names.

        Afterwards the model computes the same without the tool, and so does what is saved of it.
        Processes that hold parts of a model all call it, at the same place.

        Args:
            model: The model; without it, all models that ran.

        Raises:
            ToolError: Parameters of this framework cannot be written in place, or a parameter is
                also read unchanged, as that of an embedding may be which is tied to a product.
                Or the model has none that the tool changes, such as one that has not yet run.
        """
        chosen = None if model is None else {id(one) for one in model_of(model)}
        names = []
        weights = self._baked("bake")
        with disabled():
            for root in {one.weight.root: None for one in weights}:
                some = [one for one in weights if one.weight.root == root]
                meet(f"{self.tool_name}.bake", self._model(root), some)
            for weight, facts, edit in weights:
                parameter = weight.parameter
                if (
                    edit is None
                    or parameter is None
                    or not (chosen is None or id(parameter) in chosen)
                ):
                    continue
                try:
                    facts.update(parameter, on_whole(facts, edit))
                except NotReadableError as error:
                    raise ToolError(
                        f"{weight.name} cannot be written: {error}",
                        where=f"{self.tool_name}.bake",
                        fix="Apply the tool wherever the model runs, or use save_baked(folder)",
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
        """Return True if the tool has changed weights that can be baked."""
        return not (self.cannot_bake or self._in_phases) and any(
            self.baked(weight) is not None for weight, _ in self._met.values()
        )

    @property
    def in_parts(self) -> bool:
        """Return True if processes hold parts of the weights that operators have read."""
        placed = [(facts, weight.parameter) for weight, facts in self._met.values()]
        return any(
            facts.is_tensor(one) and facts.placement(one) is not None for facts, one in placed
        )

    def save_baked(self, folder: Path | str) -> list[Path]:
        """Write the weights as operators read them, and return the files.

        Nothing needs Amanda to load them, and the model itself is not changed. With them is what
        the tool keeps, such as masks or scales, and ``weights.json`` tells what was changed.

        A model of which processes hold parts is saved as one: each of them calls this at the same
        place, while they can communicate. The first one writes, and the others return no files. So
        it is with the folder of `saves_to` if they have copies of the model; if it is not known
        whether they have, each writes to its own folder there, such as ``rank1``.

        Args:
            folder: The folder, which is made if there is none.

        Raises:
            ToolError: No model ran, it is gone, its values cannot be read, or a parameter is also
                read unchanged.
            ImportError: NumPy or safetensors is not installed.
        """
        require("safetensors", "safetensors")
        if str(folder) == getattr(self, "saves_to", None) and not self.in_parts:
            if self._place is None:
                return []
            folder = Path(folder) / self._place
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
            path = create_folder(folder) if any(one.is_written for one in models) else None
            files, about = self.write_kept(path)
        if path is None:
            return []
        about = {"tool": type(self).__name__, "by_operator": [], **about}
        return [*write_models(path, models, about), *files]

    def _baked(self, method: str) -> list[Baked]:
        """Return each weight that operators read, with the function to be written into it."""
        if self.cannot_bake:
            raise ToolError(
                self.cannot_bake,
                where=f"{self.tool_name}.{method}",
                fix="Apply the tool wherever the model runs",
            )
        if self._in_phases:
            raise ToolError(
                f"{self.tool_name} changes weights in some steps or calls only, and what is "
                "written has one value",
                where=f"{self.tool_name}.{method}",
                fix="Remove that restriction with where(None), and run the model again",
            )
        found = [*self.read_otherwise(), *self._left_out()]
        others = list_weights(self.otherwise, found)
        if others:
            raise ToolError(
                others[0],
                where=f"{self.tool_name}.{method}",
                fix="Change them wherever they are read, or untie them before the tool runs",
            )
        return [Baked(weight, facts, self.baked(weight)) for weight, facts in self._met.values()]

    def _left_out(self) -> list[UnreachedWeight]:
        """Return the changed weights that operators read which `where` leaves out."""
        found = []
        for owner, ops in self._all_reads.ops.items() if self._all_reads is not None else ():
            others = [name for op, name in ops.items() if op not in self._own_ops.get(owner, ())]
            weight, _ = self._met.get(owner, (None, None))
            if weight is not None and others and self.baked(weight) is not None:
                why = f"also read by {others[0]}, which where() leaves out"
                found.append(UnreachedWeight(weight.name, math.prod(weight.shape), why))
        return found


class _AllReads(Tool):
    """Notes which operators read each weight.

    Attributes:
        ops: Owner of a weight -> the name of each operator, by its id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, dict[int, str]] = {}
        self.add_inst_for_op(self.note)

    def note(self, context: OpContext) -> None:
        reads = context.weights
        for weight in reads.values() if reads.consumed and context.zone != "optimizer" else ():
            self.ops.setdefault(weight.owner, {})[context.get_op_id()] = context.name


def _place_of(facts: Facts, model: Any) -> str | None:
    """Return where this process writes weights, of all that write to one folder.

    Processes that train copies of a model together write it once.
    """
    try:
        return "" if facts.group(model).rank == 0 else None
    except UnsupportedError:  # Each may have layers or values of its own.
        return f"rank{facts.rank()}"
