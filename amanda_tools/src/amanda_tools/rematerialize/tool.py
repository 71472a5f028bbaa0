"""`Rematerialize`: train within a memory budget, by dynamic tensor rematerialization.

Decides which operators take part. `store` keeps their values, `policy` says which to evict.

Source: Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, get_args

from amanda_core import OpContext
from amanda_core.engine.selection import Selection, select
from amanda_core.interface.namespace import matches
from amanda_core.runtime.threads import original
from amanda_tools.kit.operators.tool import OperatorTool
from amanda_tools.rematerialize.policy import Heuristic
from amanda_tools.rematerialize.result import RematerializedOp, RematerializeResult

if TYPE_CHECKING:
    from typing import Self

    from amanda_tools.rematerialize.store import Store

__all__ = ["Rematerialize"]

#: Operators that return a view of their input in every case.
_VIEWS = frozenset(
    [
        *("view", "view_as", "transpose", "permute", "t", "T", "mT", "expand", "expand_as"),
        *("unsqueeze", "squeeze", "select", "narrow", "split", "chunk", "unbind", "detach"),
        *("alias", "diagonal", "unfold", "movedim", "swapaxes", "view_as_real", "__getattr__"),
    ]
)
_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
#: Steps that are measured without a budget. The others run as without the tool.
_MEASURED = [*range(10), *(first * 10**power for power in range(1, 7) for first in (2, 5, 10))]


class Rematerialize(OperatorTool["RematerializedOp"]):
    """Keeps training within a memory budget: evicts saved values and computes them again.

    Gradients are the same bit for bit, random operators such as dropout included. The budget holds
    parameters, gradients, optimizer state and the values of the model's operators. It is hard: if
    what must be in memory at once does not fit, a `BudgetError` names the operator and the smallest
    budget. What a kernel allocates and frees while it runs is not known to anybody but itself and
    comes on top.

    PyTorch in eager mode. What in-place operators save, what a program checkpoints itself, and
    values that the program's own variables refer to stay in memory.

    Args:
        budget: Bytes, or text such as ``500MB`` or ``2GiB``. Without one nothing is evicted; the
            result gives the peak and a budget that is large enough. Then the first ten steps are
            measured and a few later ones (20, 50, 100, ...), unless `where` or ``--steps`` selects
            steps.
        heuristic: Which value is evicted: the one with the lowest cost for its size and age.
            ``neighborhood`` adds the cost of the evicted values around it, ``classes`` an
            approximation of this that is faster, ``local`` nothing.
        strict: Raise if the budget is not enough. Otherwise it is exceeded by what cannot be
            evicted; a budget of 0 then evicts whatever can be.

    Raises:
        ValueError: The budget or the heuristic is not one of these.

    >>> tool = Rematerialize("500MB")
    """

    works_on = ("pytorch/*/eager",)
    changes_values = False  # What is evicted is computed again.

    def __init__(
        self,
        budget: int | str | None = None,
        heuristic: Heuristic = "classes",
        strict: bool = True,
    ) -> None:
        super().__init__()
        if heuristic not in get_args(Heuristic):
            raise ValueError(f"heuristic must be of {', '.join(get_args(Heuristic))}")
        self.budget = None if budget is None else _bytes(budget)
        self.heuristic: Heuristic = heuristic
        self.strict = strict
        self._store: Store | None = None
        self._roots: set[str] = set()
        #: Whether only some steps are measured; those, and whether there were others.
        self._samples = False
        self._measured: list[int] = []
        self._others = False
        self.where(None)
        self.add_inst_for_op(self.analyse)
        if self.budget is None:
            self.add_inst_for_step(self.begin_step)

    def where(self, selection: Selection | None) -> Self:
        """Restrict the tool to a selection; without a budget, see the class."""
        chooses = selection is not None and bool(selection.phase(0))
        self._samples = self.budget is None and not chooses
        if self._samples:
            measured = select(steps=_MEASURED)
            selection = measured if selection is None else selection & measured
        return super().where(selection)

    def begin_step(self, number: int) -> None:
        """Note which steps are measured."""
        if self._samples and number in _MEASURED:
            self._measured.append(number)
        elif self._samples:
            self._others = True

    def analyse(self, context: OpContext) -> None:
        """Run an operator of the model so that what it saves can be evicted; watch the others."""
        why = self.why_unsupported(context)
        if why is None and not matches(self.works_on[0], context.namespace):
            why = "only what PyTorch's autograd saves in eager mode can be evicted"
        if why is not None:
            self._notes.setdefault(f"not supported on {context.namespace}: {why}")
            return
        if self._store is None:
            # Imports PyTorch, which is loaded by now.
            from amanda_tools.rematerialize.store import Store

            assert context.facts is not None
            self._store = Store(self.budget, self.heuristic, self.strict, context.facts)
        self._expect(context)
        if context.op_type in _VIEWS:
            return
        if not self.is_wanted(context) or not _is_pure(context):
            context.insert_before_op(self.begin_write, observe=True)
            context.insert_after_op(self.see, observe=True)
            return
        op = self.account_of(context, lambda: RematerializedOp.of(context))
        places = [key if isinstance(key, int) else key[0] for key in context.weights]
        context.replace_op(self.run, op=op, weights=frozenset(places))
        context.insert_before_backward_op(self.arrive, observe=True, op=op)
        context.insert_after_backward_op(self.leave, observe=True)

    def _expect(self, context: OpContext) -> None:
        """Count the parameters of a model from its first operator on, read or not."""
        assert self._store is not None
        weights = context.weights
        for weight in weights.values():
            if weight.root not in self._roots:
                self._roots.add(weight.root)
                item = weight.parameter.element_size()
                shapes = weights.shapes().items()
                self._store.expect({name: math.prod(shape) * item for name, shape in shapes})
            self._store.meet(weight.owner)

    def run(self, *inputs: Any, op: RematerializedOp, weights: frozenset[int]) -> Any:
        """Run an operator within the budget."""
        call = original()
        assert call is not None
        assert self._store is not None
        with self._lock:
            return self._store.run(op, call, inputs, weights)

    def begin_write(self, *inputs: Any) -> None:
        """Look which of its inputs an operator writes that runs as without the tool."""
        assert self._store is not None
        with self._lock:
            self._store.begin_write(inputs)

    def see(self, *outputs: Any) -> None:
        """Count the memory that an operator allocates whose values stay in memory."""
        assert self._store is not None
        with self._lock:
            self._store.end_write()
            self._store.see(outputs)

    def arrive(self, *gradients: Any, op: RematerializedOp) -> None:
        """Make room for the gradients that an operator's backward is going to make."""
        assert self._store is not None
        with self._lock:
            self._store.see(gradients)
            self._store.begin_backward(op)

    def leave(self, *gradients: Any) -> None:
        """Count the gradients that an operator's backward has made."""
        assert self._store is not None
        with self._lock:
            self._store.end_backward()
            self._store.see(gradients)

    def result(self) -> RematerializeResult:
        """Return what has been evicted and computed again so far."""
        with self._lock:
            found = RematerializeResult(self.budget, notes=list(self._notes))
            if self._others:
                found.measured = list(self._measured)
            found.ops = [op for op in self._ops.values() if op.calls]
            store = self._store
            if store is not None:
                found.peak, found.floor = store.peak, store.floor
                found.computed_seconds, found.repeated_seconds = store.computed, store.repeated
            return found


def _is_pure(context: OpContext) -> bool:
    """Return True if an operator can be repeated: it writes nothing, draws from no generator of
    the program's own, and is PyTorch's.
    """
    name = context.op_type
    in_place = name.endswith("_") and not name.endswith("__")
    in_place = in_place or name in ("__setitem__", "out") or bool(re.match(r"__i\w+__$", name))
    in_place = in_place and name not in ("__invert__", "__index__", "__int__")
    if in_place or context.attrs.keys() & {"out", "generator"}:
        return False
    from torch.overrides import is_tensor_like

    # A function of `torch.autograd` or TorchScript and a custom operator are a program's own code,
    # which may count its calls.
    kinds = ("ScriptFunction", "ScriptMethod")
    if isinstance(op := context.get_op(), type) or type(op).__name__ in kinds or "::" in name:
        return False
    # An object that overrides operators, such as a TensorDict, computes what it likes.
    facts, values = context.facts, list(context.get_inputs() or ())
    values += [item for value in values if isinstance(value, (list, tuple)) for item in value]
    return not any(
        is_tensor_like(value)  # type: ignore[no-untyped-call]
        and not (facts and facts.is_tensor(value))
        for value in values
    )


def _bytes(text: int | str) -> int:
    """Return a number of bytes, given as a number or as text such as ``500MB``."""
    plain = str(text).replace(",", "")  # As in messages.
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", plain)
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"a budget is a number of bytes or text such as 500MB, not {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])
