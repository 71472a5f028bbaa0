"""Plans of ops in the form that the native interceptor executes.

Owns the decision which plans have that form, as a table of refusals: insertions before and after
the forward op, and before and after its backward (as a whole, or at one node), without autodiff.
All others are executed by `execute` and `gradients.backward`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from amanda_core.driver_kit import Marks, Step
from amanda_driver_torch.communication import is_unfinished
from amanda_driver_torch.execution.native_gradients import gradient_parts
from amanda_driver_torch.execution.node_plans import MANY, are_plain
from amanda_driver_torch.gradients.nodes import new_nodes, tensors_in
from amanda_driver_torch.gradients.operator_call import OperatorCall
from amanda_driver_torch.gradients.taps import Taps
from amanda_driver_torch.operators.bindings import FACTORIES, IN_PLACE_METADATA
from amanda_driver_torch.operators.overloads import KINDS
from amanda_driver_torch.threads.state import AFTER_FORWARD, BEFORE_FORWARD, STATE
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.internals import (
    is_grad_enabled,
    saved_by,
    top_saved_tensor_hooks,
)
from amanda_driver_torch.torch_internals.native_fields import ProgramFields
from amanda_driver_torch.torch_internals.tensor_attributes import PLAIN

__all__ = ["REFUSALS", "PlanFacts", "Refusal", "compiled", "refusals"]

# The most arguments of a call that C handles (`MOST_OPERANDS`).
_MOST = 24


class Refusal(NamedTuple):
    """A reason why a plan does not get another form.

    Attributes:
        name: Its name.
        why: A sentence for people.
        applies: Returns True for facts to which it applies.
    """

    name: str
    why: str
    applies: Callable[[Any], object]


def refusals(**sentences: str) -> tuple[Refusal, ...]:
    """Return a refusal for each named fact, given its sentence."""
    return tuple(Refusal(name, why, attrgetter(name)) for name, why in sentences.items())


def _saves_elsewhere(facts: PlanFacts) -> bool:
    """Return True unless all tensors that an op saved can be copied after it."""
    if not facts.copies:
        return False
    call = facts.call
    nodes, _ = new_nodes(call.made(call.outputs_of(call.returned)), call.start)
    return len(call.saved or ()) != sum(1 for node in nodes for _ in saved_by(node))


_NAMED = refusals(
    absent="The extension is not used.",
    is_unfinished="A routine gets what a functional collective may not have written yet.",
    recomputes="A checkpointed function is being recomputed.",
    replaces="A tool replaces the op or its backward.",
    has_many_values="The op has more than 16 values.",
    has_intricate_routines="A routine gets a value that may not be there, or many arguments.",
    is_due="An analysis routine runs at each execution.",
    returns_nothing="The op writes its first argument and returns nothing.",
    writes_in_part="A routine gets gradients of an op that writes a view or changes its shape.",
    differentiates="The code of a routine is differentiated, or gradients are not known yet.",
    overrides="A routine gets gradients of a tensor subclass, or edits what is written by one.",
    has_many_arguments="The call has more than 24 arguments.",
    has_other_attributes="An attribute of the call has a type that C does not compare.",
)
_ELSEWHERE = "An edit must not change what the op has saved, and not all of that is known."
#: The reasons, in the order in which they are asked for.
REFUSALS = (*_NAMED, Refusal("saves_elsewhere", _ELSEWHERE, _saves_elsewhere))


class PlanFacts:
    """Facts about an execution that decide whether calls like it may run in C."""

    def __init__(self, call: OperatorCall, taps: Taps | None) -> None:
        self.call, session, before, after = call, call.session, call.before, call.after
        arriving, leaving, layout = call.arriving, call.leaving, call.bound.layout
        self.absent = native is None or call.execution.backward.watch is None
        steps = (*before.steps, *after.steps)
        self.is_unfinished = is_unfinished(call.operator.op_type, steps)
        self.recomputes = STATE.recomputing
        self.replaces = before.replacement or arriving.replacement or leaving.replacement
        width = len(layout.sources)
        self.has_many_values = width > MANY
        self.has_intricate_routines = not (
            are_plain(before.steps, width) and are_plain(after.steps, MANY)
        )
        self.is_due = session.due(call.context, BEFORE_FORWARD, AFTER_FORWARD)
        self.on_gradients = bool(arriving.steps or leaving.steps)
        # Without gradients there is nothing to differentiate.
        self.with_gradients = taps is not None or not self.on_gradients
        for step in steps:
            self.with_gradients = self.with_gradients and not step.action.autodiff
        in_place = call.bound.signature.in_place
        self.assigns = in_place and call.operator.op_type == "__setitem__"
        self.returns_nothing = self.writes_in_part = self.edits_written = self.copies = False
        if in_place or not (layout.bound or call.operator.op_type in FACTORIES):  # It may write.
            self._read_written(call, taps)
        self.differentiates = not self.with_gradients and is_grad_enabled()
        args, kwargs = call.bound.given
        self.operands = operands = (*args, *kwargs.values())
        self.names = tuple(kwargs)
        self.sources, attrs, self.outs = layout.numbered(len(args), self.names)
        # A subclass may override attributes that C would read.
        self.overrides = (self.on_gradients or self.edits_written) and not PLAIN.issuperset(
            map(type, tensors_in(operands))
        )
        self.has_many_arguments = len(operands) > _MOST
        # The context shows attributes as they were in the execution that Python has seen.
        self.fixed = [(number, operands[number]) for number in attrs] if attrs else []
        self.has_other_attributes = self.fixed and not all(type(v) in KINDS for _, v in self.fixed)

    def _read_written(self, call: OperatorCall, taps: Taps | None) -> None:
        signature, saved = call.bound.signature, call.saved
        self.returns_nothing = call.returned is None and signature.in_place and not self.assigns
        # The gradient of what it writes is not that of a new value.
        keeps_shape = call.operator.op_type not in IN_PLACE_METADATA
        whole = call.bound.bound and keeps_shape and call.writes_whole
        self.writes_in_part = taps is not None and self.on_gradients and not whole
        self.edits_written = call.after.edits
        if self.edits_written:
            # An op saves the same for backward if the same inputs require gradients. If its result
            # may be edited, it must be known what the op has saved of its argument.
            self.copies = saved is not None and any(saved)
            is_known = saved is not None and (signature.whole or self.assigns)
            self.with_gradients = self.with_gradients and is_known


def mark_of(step: Step) -> object:
    """Return what records a step's mark without Python, or None if Python has to."""
    marks = Marks.of(step.action.routine)
    if marks is None or marks.clock is not time.perf_counter_ns:
        return None
    held = weakref.ref(marks)

    def full() -> None:
        if (alive := held()) is not None:
            alive.full()

    journal = marks.source("pytorch", lambda: native.Journal(full, Marks.limit))
    return journal.mark(step.action.kwargs["number"])


if native is not None:
    native.learn_marks(Marks.note, mark_of)


def compiled(call: OperatorCall, taps: Taps | None, nodes: int) -> object:
    """Compile the plan of an op to a program for calls like that of `call`; None if it is not
    possible.

    Args:
        call: The execution that has just taken place.
        taps: The aligned gradients of that execution, if it had gradients.
        nodes: Number of backward nodes that the op made, if these need nothing more; else -1.
    """
    facts = PlanFacts(call, taps)
    for refusal in REFUSALS:
        if refusal.applies(facts):
            return None
    operands, fixed, parts = facts.operands, facts.fixed, None
    if facts.on_gradients or facts.edits_written:
        found = gradient_parts(call, facts.sources, operands, taps, facts.edits_written)
        if found is None:
            return None
        # Hooks of the program may have taken what was saved elsewhere before it can be copied.
        hooks = top_saved_tensor_hooks if facts.copies else None
        parts = found.parts
        parts.in_place = call.bound.signature.in_place and facts.on_gradients
        parts.saved_hooks = hooks
        nodes = nodes - found.identities if nodes >= 0 else nodes
        fixed = fixed if found.values is None else found.values
    layout, returned = call.bound.layout, call.returned
    fields = ProgramFields()
    fields.epoch = call.session.epoch
    fields.watch = call.execution.backward.watch
    fields.context = call.context
    fields.execution = call.context.execution
    fields.operands = operands
    fields.keywords = facts.names
    fields.sources = facts.sources
    fields.defaults = layout.defaults
    fields.spread = -1 if layout.spread is None else layout.spread
    fields.fixed = fixed
    fields.outs = facts.outs
    fields.before = call.before.steps
    fields.after = call.after.steps
    fields.outputs = len(returned) if isinstance(returned, (tuple, list)) else 1
    fields.nodes = nodes
    fields.with_gradients = facts.with_gradients
    fields.writes = call.mutated or None
    fields.aliases = call.operator.aliases
    fields.assigns = facts.assigns
    fields.gradients = parts
    return native.Program(fields)
