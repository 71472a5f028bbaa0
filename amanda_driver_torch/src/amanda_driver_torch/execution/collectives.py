"""One execution of a collective: a method of a process group that communicates.

Owns the order of analysis, edits and the call, which ends where the program waits for it. Nothing
here communicates, and nothing waits before the program does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from amanda_core.driver_kit import OpContext, OriginalCall, Plan, Session
from amanda_core.interface import IPoint, UnsupportedError
from amanda_driver_torch.communication import bytes_of
from amanda_driver_torch.execution.written_values import write_argument
from amanda_driver_torch.gradients.edits import check_written, refused
from amanda_driver_torch.gradients.nodes import tensors_in
from amanda_driver_torch.gradients.records import OpRecord
from amanda_driver_torch.threads.modes import analysed, changes_of
from amanda_driver_torch.threads.state import AFTER_FORWARD, BEFORE_FORWARD, STATE
from amanda_driver_torch.torch_internals.distributed import BROADCAST, Communicator, ranks_of
from amanda_driver_torch.torch_internals.internals import is_inference_mode_enabled

__all__ = ["Collective", "CollectiveCall", "finish", "is_pending"]

#: Collectives that have begun, by the id of the object on which the program waits for them.
_PENDING: dict[int, tuple[weakref.ref[Any], CollectiveCall]] = {}


class Collective:
    """Facts that are the same in every call of one method of process groups.

    Attributes:
        op_type: Its name in contexts, after the function of `torch.distributed` that calls it.
        raw: That function.
        given: The argument that other processes get; None if there is none.
        written: The argument that it writes; None if there is none.
        is_internal: Whether torch calls it, for modules.
    """

    def __init__(self, method: Callable[..., Any], communicator: Communicator) -> None:
        self.op_type = f"c10d::{communicator.function}"
        self.raw = getattr(torch.distributed, communicator.function, method)
        self.given, self.written = communicator.given, communicator.written
        self.is_internal = method.__name__ == BROADCAST
        self.is_in_place = self.given is not None and self.given == self.written

    def values(self, args: Sequence[Any]) -> list[Any]:
        """Return the inputs in the arguments of a call: what this process gives to others."""
        return [] if self.given is None else [_unwrapped(args[self.given])]

    def outputs(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that a call writes."""
        return [] if self.written is None else tensors_in([args[self.written]])

    def is_bound(self, args: Sequence[Any]) -> bool:
        """Return True if all tensors are positional arguments."""
        places = [place for place in (self.given, self.written) if place is not None]
        return len(args) > max(places, default=-1)


class CollectiveCall:
    """One call of a collective, from where it begins to where the program waits for it.

    Args:
        session: The session.
        record: The op's record.
        collective: The method.
        group: The process group.
        args: The other positional arguments.
        kwargs: The keyword arguments.
        keys: Further keys of the context.
        too_late: What has gone on with the result before it can be edited; empty if nothing has.
    """

    context: OpContext

    def __init__(
        self,
        session: Session,
        record: OpRecord,
        collective: Collective,
        group: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keys: Mapping[str, Any] | None = None,
        too_late: str = "",
    ) -> None:
        self.session, self.record, self.collective = session, record, collective
        self._keys, self._too_late = keys or {}, too_late
        self.group, self.args, self.kwargs = group, args, kwargs
        self.inputs, self.outputs = collective.values(args), collective.outputs(args)
        self.tools, self.attachment = session.tools, STATE.attachment
        self._kept: dict[str, Any] = {}
        self._spent = 0.0

    def execute(self, call: Callable[..., Any]) -> Any:
        """Begin the communication, and return what the original returns."""
        failures, site = self.session.failures, self.record.site
        original = failures.original(call)
        try:
            return self._start(original)
        except Exception as error:
            if not failures.is_drivers(error, original):
                raise
            args = (self.group, *self.args)
            return failures.recover(error, site.namespace, site.name, original, args, self.kwargs)
        finally:
            original.forget()

    def _start(self, original: OriginalCall) -> Any:
        context = self._open()
        try:
            before = self._analyse(BEFORE_FORWARD)
            if before.replacement is not None:
                raise UnsupportedError(
                    "A collective cannot be replaced: other processes wait for this one",
                    where=before.replacement.where,
                    fix="Edit what it sends before it, or what it has written after it",
                )
            for step in before.steps:
                self._edit_inputs(step)
            begin = perf_counter()
            returned = original(self.group, *self.args, **self.kwargs)
            self._spent = perf_counter() - begin
            if hasattr(returned, "wait"):
                self._kept = dict(context.execution)
                number = id(returned)
                gone = weakref.ref(returned, lambda _: self._drop(number))
                _PENDING[number] = gone, self
            else:  # The backend has waited already.
                self._end()
        finally:
            context.release()
        return returned

    def finish(self, waited: float) -> None:
        """Run the routines after the op: the program has waited for it.

        Args:
            waited: For how long, in seconds.
        """
        if self.session.closed or STATE.attachment is not self.attachment:
            why = "since another thread, or the program without tools, waited for them"
            self.session.note_call(self.record.site.name, why)
            return
        if not self.session.enabled:
            return
        try:
            self.context.execution.clear()
            self.context.execution.update(self._kept)
            self._spent += waited
            try:
                self._end()
            finally:
                self.context.release()
        except Exception as error:
            site = self.record.site
            self.session.failures.report(error, site.namespace, site.name)

    def _open(self) -> OpContext:
        collective, site = self.collective, self.record.site
        names = ("input",) if self.inputs else ()
        context = self.context = self.record.context = self.session.open(
            site,
            collective.raw,
            inputs=self.inputs,
            attrs=_attributes(self.args, self.kwargs),
            input_names=names,
            recomputed=STATE.recomputing,
        )
        context["group"] = ranks_of(self.group)
        context["bytes"] = max(bytes_of(self.inputs), bytes_of(self.outputs))
        context.setdefault("wait", None)
        context.update(self._keys)
        execution = context.execution
        # What it gives to other processes is computed with there.
        execution["passes_weights_on"] = lambda: True
        execution["writes"] = frozenset({0} if collective.is_in_place else ())
        execution["destinations"] = [] if collective.is_in_place else self.outputs
        return context

    def _analyse(self, point: IPoint) -> Plan:
        if not is_inference_mode_enabled():
            return analysed(self.context, point)
        with torch.inference_mode(False):
            return analysed(self.context, point)

    def _edit_inputs(self, step: Any) -> None:
        for position, new in changes_of(step, self.inputs, ()):
            old = self.inputs[position]
            if self.collective.is_in_place:
                write_argument(old, new, step)
            else:
                self._send(old, new, step)

    def _send(self, old: Any, new: Any, step: Any) -> None:
        """Let the original send other values: those of the program stay what they are."""
        given = self.collective.given
        assert given is not None
        olds, news = tensors_in([old]), tensors_in([new])
        if len(olds) != len(news):
            what = f"{len(news)} tensors cannot be sent in place of {len(olds)}"
            raise refused(step, what, "Return as many tensors as the routine was given")
        for one, other in zip(olds, news, strict=True):
            check_written(one, other, step)
        argument = _replaced(self.args[given], (one.contiguous() for one in news))
        self.args = (*self.args[:given], argument, *self.args[given + 1 :])
        self.inputs = self.collective.values(self.args)
        self.context.execution["inputs"] = self.inputs

    def _end(self) -> None:
        context, session = self.context, self.session
        context["wait"] = self._spent
        context.execution["outputs"] = self.outputs
        after = self._analyse(AFTER_FORWARD)
        outputs = list(self.outputs)
        for step in after.steps:
            if step.action.tool not in self.tools:
                continue  # It was applied after the collective had begun.
            for position, new in changes_of(step, outputs, ()):
                if self._too_late:
                    what = f"{self._too_late} has gone on with what was reduced"
                    raise refused(step, what, "Edit it before, or edit gradients at ReduceGrad")
                write_argument(outputs[position], new, step)
        if session.caching and not (after or context.plan(BEFORE_FORWARD)):
            self.record.idle_epoch = session.epoch

    def _drop(self, number: int) -> None:
        """Note that the program dropped the object on which it could have waited."""
        if _PENDING.pop(number, None) is not None and not self.session.closed:
            why = "since the program did not wait for them"
            self.session.note_call(self.record.site.name, why)


def is_pending(work: Any) -> bool:
    """Return True if routines after a collective run when the program waits for it."""
    return id(work) in _PENDING


def finish(work: Any, waited: float) -> None:
    """Run the routines after a collective for which the program has waited."""
    _, call = _PENDING.pop(id(work), (None, None))
    if call is not None:
        call.finish(waited)


def _unwrapped(argument: Any) -> Any:
    """Return a tensor that is alone in a list, or in a list of lists, else the list of tensors."""
    while isinstance(argument, (list, tuple)) and len(argument) == 1:
        argument = argument[0]
    return argument


def _replaced(argument: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return lists of tensors with others in their places, in this order."""
    if isinstance(argument, (list, tuple)):
        return [_replaced(one, tensors) for one in argument]
    return next(tensors) if isinstance(argument, torch.Tensor) else argument


def _attributes(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what the options of a call say that tools may want to know."""
    found: dict[str, Any] = {}
    for options in (*args, *kwargs.values()):
        for name, known in (("asyncOp", "async_op"), ("rootRank", "root")):
            if hasattr(options, name):
                found[known] = getattr(options, name)
        if hasattr(options, "reduceOp"):
            # Of an enumeration, or an object that has such a member.
            found["op"] = str(getattr(options.reduceOp, "op", options.reduceOp)).rpartition(".")[2]
    return found
