"""`Replicas`: record in each process what should be equal in several of them.

Decides what is recorded beside what `fingerprint` records. `verdict` compares the processes after
the run, so that nothing is sent between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from amanda_core import OpContext
from amanda_core.errors import UnsupportedError
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_core.runtime.weak import Known
from amanda_tools.fingerprint.files import (
    ARGUMENTS,
    CONSTANT,
    GRADIENT,
    INPUT,
    NO_ITEM,
    SKETCH,
    UNREADABLE,
    digest_of,
)
from amanda_tools.fingerprint.result import FingerprintResult
from amanda_tools.fingerprint.tool import Fingerprint, norms_of
from amanda_tools.kit.operators.entries import leaf_of
from amanda_tools.kit.tensors.values import facts_of, numbers
from amanda_tools.replicas.result import ReplicasResult

__all__ = ["AT_NORM", "AT_STEP", "AT_UPDATE", "OWN", "REDUCED", "Replicas"]

#: When a gradient is recorded: as the backward pass of this process adds it; where the program
#: computes its norm; at the first operator of an optimizer or of clipping; at the first operator
#: of an optimizer that reads a weight; when a wrapper for several processes has reduced it.
OWN, AT_NORM, AT_STEP, AT_UPDATE, REDUCED = range(5)
#: Common types and types of operators that compute norms of gradients.
_NORMS = frozenset({"norm", "pow", "square", "dot", "vdot", "_foreach_norm"})
#: Number of elements of a gradient after which the pattern of a sketch repeats.
_PERIOD = 4096


class Replicas(Fingerprint):
    """Records what should be equal in the processes that train one model.

    After the run ``amanda diff OUT`` compares the processes: weights that they all have, gradients
    after their reduction, buffers, values that tensor-parallel processes share, random numbers, and
    norms of gradients. It names the first one that differs, its operator, line and step, and both
    processes. Nothing is sent between processes.

    Args:
        steps: Numbers of the steps to record; the default is all.
        folder: Folder to write to while the program runs, so that the rows are there even if the
            process is killed. By default a temporary one, from which the result is written.
        replicated: Patterns of names of weights that are equal in all processes. Without them,
            these are the weights that were equal when they were read first.
        sharded: Patterns of names of weights that may differ, such as ``experts.*``.

    Raises:
        ValueError: The folder has a fingerprint already.
        ImportError: NumPy is not installed.

    >>> tool = Replicas(sharded=["*.experts.*"])
    """

    _form: ClassVar[type[FingerprintResult]] = ReplicasResult
    has_plain_rows: ClassVar[bool] = False

    def __init__(
        self,
        steps: list[int] | None = None,
        folder: Path | None = None,
        replicated: list[str] | None = None,
        sharded: list[str] | None = None,
    ) -> None:
        super().__init__(norms=True, steps=steps, folder=folder)
        self._stream.say(replicated=replicated or [], sharded=sharded or [])
        #: Root of a model -> how many processes train it together; 0 if that is not known.
        self._groups: dict[str, int] = {}
        self._names: Known[str] = Known()
        #: Names of weights whose gradients were added, and the weights.
        self._leaves: Known[tuple[str, Facts]] = Known()
        #: Operator numbers -> the weight whose gradient the operator adds; when others may read
        #: gradients.
        self._adds: dict[int, str] = {}
        #: Operator numbers -> the weight whose gradient has been reduced.
        self._reduces: dict[int, str] = {}
        self._reads: dict[int, int] = {}
        #: At which points gradients were recorded since the last one was added.
        self._recorded: set[int] = {OWN, AT_NORM, AT_STEP, AT_UPDATE}

    def analyse(self, context: OpContext) -> None:
        """Insert routines that record an operator, and note if it may read gradients."""
        super().analyse(context)
        op = self.known(context)
        if op is None:
            return
        if context.zone == "optimizer":
            self._reads[op.number] = AT_UPDATE if context.weights else AT_STEP
        elif {context["type"], context.op_type} & _NORMS or "vector_norm" in context.op_type:
            self._reads[op.number] = AT_NORM

    def analyse_backward(self, context: OpContext) -> None:
        """Insert routines that record a backward operator, and note which weight it is of."""
        super().analyse_backward(context)
        op = self.known(context)
        leaf = leaf_of(context)
        if op is not None and leaf is not None:
            name = self._names.get(leaf) or context.name.rpartition(":")[0]
            self._adds[op.number] = name
            self._leaves.set(leaf, (name, facts_of(context)))
        if op is not None and context["backward_type"] == "reduce_grad":
            short = context.name.rpartition(":")[0]
            names = [name for _, (name, _) in self._leaves.items()]
            names = [name for name in names if name.partition(":")[2] == short]
            if len(names) == 1:  # Several models may have one of this name.
                self._reduces[op.number] = names[0]

    def _weights_of(self, context: OpContext) -> list[tuple[int, int, str]] | None:
        if context.is_backward():
            return None
        found = []
        for place, weight in context.weights.items():
            if weight.varies or not weight.exact or weight.region:
                continue
            if weight.root not in self._groups:
                self._groups[weight.root] = _size(facts_of(context), context, weight.root)
                processes = facts_of(context).processes()
                self._stream.say(groups=self._groups, processes=processes)
            if (parameter := weight.parameter) is not None:
                self._names.set(parameter, weight.owner)
            position, item = place if isinstance(place, tuple) else (place, NO_ITEM)
            found.append((position, item, weight.owner))
        return found

    def _add_rows(self, values: Sequence[Any], op: Any, what: int, execution: Any) -> None:
        at = self._reads.get(op.number) if what == INPUT else None
        if at is not None and at not in self._recorded:
            self._record_gradients(at, values)
        super()._add_rows(values, op, what, execution)
        if what != INPUT:
            return
        for value in values:
            self._leaves.get(value)  # Tools that are applied again know it by this.
        name = self._adds.get(op.number)
        if name is not None:
            self._recorded.clear()
            self._sketch(OWN, self._named("weight", name), values[0], op.facts)
        if (name := self._reduces.get(op.number)) is not None:
            number = self._named("weight", name)
            self._gradient(REDUCED, self._next(), number, values[0], op.facts)
        text = repr([_plain(value, op.facts) for value in values])
        self._aside(ARGUMENTS, self._order, op.number, execution.number, digest_of(text.encode()))

    def _record_gradients(self, at: int, values: Sequence[Any]) -> None:
        """Record the gradients as the program reads them now."""
        found = [
            (name, gradient, facts)
            for leaf, (name, facts) in self._leaves.items()
            if (gradient := getattr(leaf, "grad", None)) is not None
        ]
        if at == AT_NORM:
            read = {_memory(value, facts) for value in _flat(values) for _, _, facts in found[:1]}
            if not any(_memory(gradient, facts) in read for _, gradient, facts in found):
                return  # It is the norm of something else.
        self._recorded.add(at)
        if at == AT_UPDATE and AT_STEP not in self._recorded:
            self._recorded.add(at := AT_STEP)
        order = self._next()
        for name, gradient, facts in found:
            number = self._named("weight", name)
            self._gradient(at, order, number, gradient, facts)
            if at != AT_NORM:
                self._sketch(at, number, gradient, facts)

    def _gradient(self, at: int, order: int, number: int, gradient: Any, facts: Facts) -> None:
        """Record a gradient of the weight with a number."""
        digest = self._digest(gradient, facts)
        norm, largest, constant = norms_of(gradient, facts)
        kind = self._type(gradient, facts.dtype(gradient), facts)
        flags = CONSTANT * constant | UNREADABLE * (digest is None)
        more = {"position": at, "type_": kind, "flags": flags}
        self._aside(GRADIENT, order, number, self._step, digest or 0, (norm, largest), **more)

    def _sketch(self, at: int, number: int, gradient: Any, facts: Facts) -> None:
        """Record two linear functions of a gradient: those of a sum are the sums of those."""
        try:
            values = numbers(facts.view(gradient), facts.dtype(gradient))
        except NotReadableError:
            return
        digest = self._digest(gradient, facts) or 0
        kind = self._type(gradient, facts.dtype(gradient), facts)
        norms = sketch_of(values)
        more = {"position": at, "type_": kind}
        self._aside(SKETCH, self._next(), number, self._step, digest, norms, **more)


def sketch_of(values: Any) -> tuple[float, float]:
    """Return two linear functions of an array, with factors that look random.

    >>> import numpy
    >>> a, b = numpy.arange(6.0), numpy.ones(6)
    >>> numpy.allclose(numpy.add(sketch_of(a), sketch_of(b)), sketch_of(a + b))
    True

    Elements that add up to zero, as the gradients of a softmax do, leave more than rounding.

    >>> min(map(abs, sketch_of([1.0, -1.0]))) > 0.01
    True
    """
    import numpy

    flat = numpy.asarray(values, numpy.float64).ravel()
    blocks = -(-flat.size // _PERIOD)
    padded = numpy.zeros((blocks, _PERIOD))
    padded.ravel()[: flat.size] = flat
    with numpy.errstate(all="ignore"):
        sums = padded @ _factors()
        factors = numpy.cos(numpy.outer(numpy.arange(blocks), numpy.sqrt([2.0, 3.0])))
        first, second = (sums * factors).sum(0)
        return float(numpy.float32(first)), float(numpy.float32(second))


@cache
def _factors() -> Any:
    import numpy

    return numpy.random.default_rng(7).standard_normal((_PERIOD, 2))


def _size(facts: Facts, context: OpContext, root: str) -> int:
    """Return how many processes train a model together, by its wrappers; 0 if unknown."""
    try:
        return facts.group(context.weights.model(root)).size
    except UnsupportedError:
        return 0


def _plain(value: Any, facts: Facts) -> object:
    """Return an argument in a form that is the same in each process; tensors have rows."""
    if facts.is_tensor(value):
        return ...
    if isinstance(value, (list, tuple)):
        return [_plain(item, facts) for item in value]
    if value is None or isinstance(value, (bool, int, float, complex, str, slice)):
        return value
    return facts.constant(value) or type(value).__name__


def _flat(values: Sequence[Any]) -> list[Any]:
    return [
        item
        for value in values
        for item in (value if isinstance(value, (list, tuple)) else (value,))
    ]


def _memory(value: Any, facts: Facts) -> object:
    """Return what identifies the memory of a tensor; the value itself if that is not known."""
    if not facts.is_tensor(value):
        return None
    try:
        storage = facts.storage(value)
    except NotReadableError:
        return id(value)
    return id(value) if storage is None else storage.key
