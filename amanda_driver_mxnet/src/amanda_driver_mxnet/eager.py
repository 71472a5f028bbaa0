"""Imperative ops: analysis at the first execution, then the plan at each one.

Owns the execution of one op. `attachment` decides which calls are ops, `gradients` watches their
backward programs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxnet import autograd
from mxnet.ndarray import NDArray

from amanda_core import IPoint, OpContext, Session, Site
from amanda_core.errors import UnsupportedError
from amanda_core.execution import OpRecord, backward_plans, several
from amanda_core.scopes import Activation, Scopes
from amanda_core.sites import Sites
from amanda_core.threads import inside_routine, standing_for
from amanda_core.weak import Known
from amanda_core.weights.parameters import Parameters
from amanda_driver_mxnet._mxnet_internals.arrays import needs_gradient
from amanda_driver_mxnet.gradients import Watch
from amanda_driver_mxnet.identity import RULES, new_labels, new_parameters, new_scopes
from amanda_driver_mxnet.routines import fold

__all__ = ["Call", "EagerProgram"]


@dataclass
class Call:
    """One call of an operator.

    Attributes:
        op_type: MXNet's name of the operator.
        inputs: Its arrays, by position.
        run: Calls it with other arrays, and returns its result.
        names: Names of the positions.
        attrs: Its other arguments.
        out: Where it writes its results; None if it makes new arrays.
    """

    op_type: str
    inputs: Sequence[NDArray]
    run: Callable[[Sequence[NDArray]], Any]
    names: tuple[str, ...] = ()
    attrs: Mapping[str, Any] | None = None
    out: Any = None


class EagerProgram:
    """The imperative program of one thread.

    Attributes:
        scopes: Names of blocks.
        activations: The calls of blocks that are running, outermost first.
        watched: Whether gates were put on the tape since the last backward program.
    """

    def __init__(self, session: Session, namespace: str) -> None:
        self.session = session
        self.activations: list[Activation] = []
        self.watched = self._initialised = False
        self.scopes: Scopes = session.persistent("mxnet.scopes", new_scopes)
        labels = session.persistent("mxnet.labels", new_labels)
        self._parameters: Parameters = session.persistent(
            "mxnet.parameters", lambda: new_parameters(self.scopes, labels)
        )
        names: dict[str, dict[Any, int]] = session.persistent("mxnet.names", dict)
        self._sites: Sites[OpRecord] = Sites(
            RULES,
            self,
            self.scopes,
            labels,
            names,
            namespace,
            self._record,
            lambda record: None,
            self._parameters,
        )
        #: Handles of the arrays that ops made.
        self._made: Known[bool] = Known()

    def _record(self, site: Site, caller: str) -> OpRecord:
        if site.zone == "model" and self._initialised:
            # Blocks get parameters in their first call, maybe after the table of them was made.
            self._parameters.forget(self.activations[0].scope.root if self.activations else "")
        self._initialised = site.zone == "init"
        return OpRecord(site)

    def execute(self, call: Call) -> Any:
        """Execute an op of the program as planned."""
        handles = [array.handle for array in call.inputs]
        return self.execute_at(self._sites.locate(call.op_type, handles, {}), call)

    def is_idle(self, record: OpRecord) -> bool:
        """Return True if no tool acts at an op."""
        session = self.session
        return record.is_idle(session) and not session.wants_backward

    def execute_at(self, record: OpRecord, call: Call) -> Any:
        """Execute an op with a known record as planned."""
        session = self.session
        if self.is_idle(record):
            result = _run(call, call.inputs)
            self._note(call, record.site.zone, several(result))
            return result
        epoch = session.epoch
        context = session.open(
            record.site,
            call.op_type,
            list(call.inputs),
            call.attrs,
            input_names=call.names,
            constant=self._constant,
        )
        try:
            result = self._planned(call, context)
        finally:
            context.release()
        record.note(session, epoch, any(map(context.plan, IPoint)))
        return result

    def _planned(self, call: Call, context: OpContext) -> Any:
        with autograd.pause(autograd.is_training()):
            before = context.trigger_callback(IPoint.BEFORE_FORWARD)
        values = fold(before, call.inputs, self._states(call))
        watch = self._watch(call, context, values)
        if watch is not None:
            values = watch.enter(values)
        if before.replacement is not None:
            with standing_for(call.run):
                result = before.replacement.replace(values)
        else:
            result = _run(call, values)
        outputs = several(result)
        self._note(call, context.zone, outputs)
        context.fill(outputs=outputs)
        with autograd.pause(autograd.is_training()):
            after = context.trigger_callback(IPoint.AFTER_FORWARD)
        new = outputs if watch is None else watch.exit(outputs, values)
        new = fold(after, new)
        if call.out is not None:
            targets = several(call.out)
            with autograd.pause():
                for target, value in zip(targets, new, strict=True):
                    if value is not target:
                        with inside_routine():
                            target[:] = value
            return call.out
        self._note(call, context.zone, new)
        return new if isinstance(result, (tuple, list)) else new[0]

    def _watch(self, call: Call, context: OpContext, values: Sequence[Any]) -> Watch | None:
        """Return the gates of an op whose gradients a tool may want."""
        session = self.session
        plans = backward_plans(context)
        late = session.due(context, IPoint.AFTER_FORWARD)
        if not autograd.is_recording() or not (any(plans) or session.wants_backward or late):
            return None
        if call.out is not None:
            if any(plan.edits for plan in plans):
                raise UnsupportedError(
                    "The gradients of an op that writes to an array of its caller (out=) cannot "
                    "be edited",
                    where=context.where,
                    fix="Leave out `out` while the program is recorded",
                )
            return None
        places = [place for place, value in enumerate(values) if needs_gradient(value)]
        self.watched = self.watched or bool(places)
        return Watch(session, context, places, len(values)) if places else None

    @staticmethod
    def _states(call: Call) -> Container[int]:
        """Return the positions of the inputs that an op writes."""
        if call.op_type.endswith("update"):
            return range(2, len(call.inputs))
        return [place for place, name in enumerate(call.names) if name.startswith("moving_")]

    def _note(self, call: Call, zone: str, arrays: Sequence[Any]) -> None:
        """Remember that an op of the model made these arrays: they are not parameters."""
        for array in arrays if zone == "model" and call.out is None else ():
            if isinstance(array, NDArray):
                self._made.set(array.handle, True)

    def _constant(self, value: Any) -> Any:
        return None if self._made.get(value.handle) else value


def _run(call: Call, values: Sequence[Any]) -> Any:
    """Run an op as MXNet does; operators that it calls are parts of it."""
    with inside_routine():
        return call.run(values)
