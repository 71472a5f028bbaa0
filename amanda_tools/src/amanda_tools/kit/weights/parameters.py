"""`ModelParameters`: the parameters of a model by module, each of them once.

Owns to which module a parameter belongs, for tools that list modules.
"""

from __future__ import annotations

import math

from amanda_core.runtime.weak import Known
from amanda_core.weights.reads import Reads, Weight
from amanda_tools.kit.operators.entries import with_parents

__all__ = ["ModelParameters"]


class ModelParameters:
    """The parameters of one model, by the modules and operators that were seen so far.

    Args:
        root: The label of its outermost module; empty outside of modules, and for drivers whose
            module paths begin with the outermost module.
        nameless: Parameters that were read before the model that has them was known, with whose
            they were taken to be. All models of a program share it.
    """

    def __init__(self, root: str, nameless: Known[tuple[ModelParameters, str]]) -> None:
        self.root, self._nameless = root, nameless
        self.classes: dict[str, str] = {}
        #: Parameter, by owner -> its shape.
        self.shapes: dict[str, tuple[int, ...]] = {}
        #: Parameter -> path of the module in which an operator read it first.
        self.read_in: dict[str, str] = {}

    def add(self, reads: Reads, path: str) -> None:
        """Record what an operator in the module at `path` reads, and the model if that is new."""
        for new in with_parents(path) if self.classes and path not in self.classes else ():
            if new and new not in self.classes and (name := reads.class_at(new)) is not None:
                self.classes[new] = name
        new_weight = any(w.root and w.owner not in self.shapes for w in reads.values())
        if path not in self.classes or new_weight:
            self.classes.update(reads.classes())
            self.classes.setdefault(path, "")
            if self.root:
                self.shapes.update(reads.shapes())
        for weight in reads.values():
            if weight.root:
                self._is_named(weight)
            # Without a model around it, a scalar is rather a counter of the framework.
            if self.root or (reads.consumed and weight.shape):
                self.shapes.setdefault(weight.owner, weight.shape)
                self.read_in.setdefault(weight.owner, path)
                if not weight.root:
                    self._nameless.set(weight.parameter, (self, weight.owner))

    def _is_named(self, weight: Weight) -> None:
        """Drop what was read of this parameter before its model was known."""
        parameter = weight.parameter if self._nameless else None
        if parameter is not None and (found := self._nameless.get(parameter)) is not None:
            model, owner = found
            model.shapes.pop(owner, None)
            self._nameless.pop(parameter)

    def by_module(self) -> dict[str, int]:
        """Return the number of elements of the parameters of each module, without those inside it.

        A parameter that several modules share counts at one of them.
        """
        own: dict[str, int] = {}
        for owner, shape in self.shapes.items():
            place = self._place_of(owner)
            own[place] = own.get(place, 0) + math.prod(shape)
        return own

    def _place_of(self, owner: str) -> str:
        """Return the path of the module to which a parameter belongs."""
        path = owner.partition(":")[2].rpartition(".")[0]
        if not (path or self.root) or path not in self.classes:
            path = self.read_in.get(owner, "")
        return next(p for p in reversed(with_parents(path)) if self._is_shown(p))

    def _is_shown(self, path: str) -> bool:
        """Return True if a module may have parameters; a subclass may leave out some."""
        return True
