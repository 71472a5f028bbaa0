"""Operators one by one: analysis at the first execution, then the plan at each one.

Owns the execution of one op. `attachment` decides which calls are ops, `gradients` watches their
backward programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from mindspore import Parameter, Tensor

from amanda_core.driver_kit import (
    EagerExecution,
    EagerProgram,
    OpCall,
    OpContext,
    OpRecord,
    Plan,
    Session,
    inside_routine,
    several,
)
from amanda_core.interface import IPoint, UnsupportedError
from amanda_driver_mindspore.gradients import Watch, is_watched, straight_through
from amanda_driver_mindspore.identity import NAMES
from amanda_driver_mindspore.mindspore_internals.tape import unrecorded, wait

__all__ = ["Call", "PyNativeProgram"]


@dataclass
class Call(OpCall):
    """One call of an operator. Tensors that were passed by name are the last values.

    Attributes:
        written: Positions of the tensors that it changes in place.
    """

    written: Sequence[int] = ()

    @property
    def is_in_place(self) -> bool:
        """True if it returns a tensor that it got and changed."""
        return 0 in self.written


class PyNativeProgram(EagerProgram):
    """The operators of one thread.

    Attributes:
        backward: How many backward programs are running.
        recomputed: How many of them compute cells again.
        compiled: How many compiled programs are running as Python.
        unfinished: The watches whose backward programs are running.
        has_acted: Whether a tool acted at an op since this was set to False.
    """

    def __init__(self, session: Session, namespace: str) -> None:
        super().__init__(session, namespace, NAMES)
        self.backward = self.recomputed = self.compiled = 0
        self.has_acted = False
        self.unfinished: list[Watch] = []
        #: The name of the last op that was not waited for.
        self._unwaited = ""

    def execute(self, call: Call) -> Any:
        """Execute an op of the program as planned."""
        record = self.sites.locate(call.op_type, _flat(call.values), {})
        if record is None or self.is_idle(record):
            self._unwaited = call.op_type if record is None else record.site.name
            return call.execute(call.values)
        self.finish(self._unwaited, " or of an operator before it")
        self._unwaited = ""
        result = _Execution(self, record, call).result()
        self.has_acted = self.has_acted or not record.is_idle(self.session)
        return result

    def finish(self, name: str, more: str = "") -> None:
        """Wait for the operators that were called.

        Args:
            name: The op that was called last; empty if there is none to wait for.
            more: Text after the name in the note on an error, on others that may have failed.

        Raises:
            Exception: What MindSpore reports of an operator that failed, with a note that names it.
        """
        if name:
            try:
                wait()
            except Exception as error:
                error.add_note(f"MindSpore reported this failure of the operator {name}{more}")
                raise


class _Execution(EagerExecution):
    """One execution of an op at which a tool may act.

    Args:
        program: The program.
        record: The record of the op.
        call: The call.
    """

    def __init__(self, program: PyNativeProgram, record: OpRecord, call: Call) -> None:
        super().__init__(
            program, record, call, constant=_constant, recomputed=program.recomputed > 0
        )
        self._program = program
        #: Positions of the values that the op changes in place: first inputs, then outputs.
        self._written: Sequence[int] = call.written
        self._form: Callable[[list[Any]], Any] = list

    def result(self) -> Any:
        """Execute the op as planned, and return what the program gets."""
        outputs = self.run(self.call.values)
        return self._form(outputs)

    def analysed(self, context: OpContext, point: IPoint) -> Plan:
        """Return the plan of the op at a point, after its analysis if it is new."""
        if self._program.compiled:
            context["not_compiled"] = True
        return super().analysed(context, point)

    def unrecorded(self) -> AbstractContextManager[object]:
        """Return a context manager in which MindSpore's tape records nothing."""
        return unrecorded()  # type: ignore[no-any-return]

    def execute(self, plan: Plan, values: list[Any]) -> list[Any]:
        """Return values as the steps of a plan edit them."""
        new = super().execute(plan, values)
        for place in self._written:
            if place < len(new) and new[place] is not values[place]:
                raise UnsupportedError(
                    "A tensor that the operator changes in place cannot be edited",
                    where=next(iter(plan)).where,
                    fix="Only observe it, or select the other inputs by `inputs=[...]`",
                )
        return new

    def edited(self, old: Any, new: Any) -> Any:
        """Return `new`, with its gradient passed straight to `old`."""
        with inside_routine():  # The driver's own operators.
            if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)):
                if len(old) == len(new):
                    return type(old)(map(straight_through, old, new))
                return new
            if isinstance(old, Tensor) and not isinstance(new, Tensor) and new is not None:
                new = Tensor(new, old.dtype)
            return straight_through(old, new)

    def computed(self, context: OpContext, result: Any) -> list[Any]:
        """Return the outputs of the op, or of its replacement, which has returned `result`."""
        self._program.finish(context.name)
        self._written = (0,) if self.call.is_in_place else ()
        self._form = _form_of(result)
        return several(result)

    def new_gates(self, context: OpContext, values: Sequence[Any]) -> Watch | None:
        """Return gates if a tool may want the gradients of the op."""
        if not is_watched(self.session, context):
            return None
        if self.call.is_in_place:
            fix = "Leave the operator out, or call the one that returns a new tensor"
            self.refuse_gradient_edits(context, "changes a tensor in place", fix)
            return None
        return Watch(self.session, context, self.call.written, self._program.unfinished)


def _constant(value: Any) -> Any:
    """Return a parameter, or a value of another type; None for other tensors."""
    return value if isinstance(value, Parameter) or not isinstance(value, Tensor) else None


def _flat(values: Sequence[Any]) -> Sequence[Any]:
    """Return values with the items of sequences in place of these."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            found += value
        else:
            found.append(value)
    return found


def _form_of(result: Any) -> Callable[[list[Any]], Any]:
    """Return a function that gives outputs the form of a result."""
    if not isinstance(result, (tuple, list)):
        return lambda outputs: outputs[0]
    if hasattr(result, "_fields"):
        return lambda outputs: type(result)(*outputs)
    return type(result)
