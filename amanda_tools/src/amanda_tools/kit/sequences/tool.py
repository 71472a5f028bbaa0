"""`SequenceTool`: the base of `capture` and `steer`: chosen modules, operators, positions, calls.

Owns which operators are chosen, what the running call computes, and the notes about patterns that
chose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from amanda_core import OpContext
from amanda_core.engine.calls import MODULE_INPUT, MODULE_VALUES, Call
from amanda_core.engine.selection import matcher, select
from amanda_tools.kit.operators.entries import with_parents
from amanda_tools.kit.operators.tool import OperatorTool
from amanda_tools.kit.sequences.places import Places
from amanda_tools.kit.sequences.spans import Span, span_of

__all__ = ["SequenceTool"]

A = TypeVar("A")


class SequenceTool(OperatorTool[A]):
    """A tool for chosen modules and operators, and for chosen positions of their values.

    Args:
        modules: Patterns of the modules whose inputs or outputs are chosen.
        ops: Patterns of the operators that are chosen.
        inputs: Whether inputs are chosen.
        outputs: Whether outputs are chosen.
        places: The chosen positions and rows.
        everything: Whether operators outside the model are also chosen.

    Raises:
        ValueError: There are neither modules nor operators.

    >>> tool = SequenceTool(["model.layers.*"], None, False, True, Places(positions=0))
    >>> tool.notes
    ["modules='model.layers.*' chose nothing that ran"]
    """

    def __init__(
        self,
        modules: Sequence[str] | None,
        ops: Sequence[str] | None,
        inputs: bool,
        outputs: bool,
        places: Places,
        everything: bool = False,
    ) -> None:
        super().__init__(everything)
        if not modules and not ops:
            raise ValueError(
                "choose something: modules=['model.layers.*'] for what modules take or return, or "
                "ops=['softmax'] for operators"
            )
        self._inputs, self._outputs, self._places = inputs, outputs, places
        self._span: Span | None = None
        self._by_module = bool(modules)
        self._patterns = {
            (kind, pattern): False
            for kind, patterns in (("modules", modules), ("ops", ops))
            for pattern in patterns or ()
        }
        #: Pattern of modules -> a module of the model that it matches and that was not called.
        self._idle: dict[str, str] = {}
        #: Module -> its first operator of which the parts are not seen; None if there is none.
        self._ran: dict[str, str | None] = {}
        #: Module -> the operator outside of it that read a parameter of it.
        self._readers: dict[str, str] = {}
        self._asked: set[str] = set()
        self._selected = select(op=ops) if ops else None
        if modules:
            self.show_modules(modules, inputs=inputs, outputs=outputs)
        self.add_inst_for_call(self._begin_call, self._end_call)

    def is_chosen(self, context: OpContext) -> bool:
        """Return True if an operator is chosen; record what cannot be chosen where it runs."""
        if context.op_type in MODULE_VALUES:
            self._note_match("modules", lambda pattern: matcher((pattern,))(context.module_path))
            return self.is_wanted(context)
        if self._by_module and self._unmatched():
            self._note_run(context)
        for capability, wanted, what in (
            ("module_values", self._by_module, "what modules take and return"),
            ("calls", not self._places.are_all, "positions and rows"),
        ):
            if wanted and not context.supports(capability):
                why = f"its driver does not tell {what}"
                self._notes.setdefault(f"not supported on {context.namespace}: {why}")
        if self._selected is None or not self._selected(context) or not self.is_wanted(context):
            return False
        self._note_match("ops", lambda pattern: select(op=pattern)(context))
        return True

    def wants_inputs(self, context: OpContext) -> bool:
        """Return True if the inputs of a chosen operator are chosen."""
        return self._inputs and context.op_type not in MODULE_VALUES

    def wants_outputs(self, context: OpContext) -> bool:
        """Return True if the outputs of a chosen operator are chosen."""
        return self._outputs or context.op_type == MODULE_INPUT

    @staticmethod
    def kind_of_output(context: OpContext) -> str:
        """Return the kind of the operator's outputs: ``output``, or the ``input`` of a module."""
        return "input" if context.op_type == MODULE_INPUT else "output"

    @property
    def notes(self) -> list[str]:
        """Return notes about values that are not seen and patterns that chose nothing."""
        return [*self._notes, *(self._why_nothing(*key) for key in self._unmatched())]

    def _unmatched(self) -> list[tuple[str, str]]:
        return [key for key, matched in self._patterns.items() if not matched]

    def _why_nothing(self, kind: str, pattern: str) -> str:
        note = f"{kind}={pattern!r} chose nothing that ran"
        if kind != "modules" or pattern not in self._idle:
            return note
        path = self._idle[pattern]
        return f"{note}: {path} is in the model, but was not called: {self._why_idle(path)}"

    def _why_idle(self, path: str) -> str:
        """Return why a module of the model was not called."""
        if path in self._ran or any(one.startswith(f"{path}.") for one in self._ran):
            return "its `forward` was, by C++ code or by code whose calls are not seen"
        for around in reversed(with_parents(path)[:-1]):
            if (op := self._ran.get(around)) is not None:
                return f"{op} computes what it would"
        if path in self._readers:
            return f"{self._readers[path]} reads its parameters and computes what it would"
        return "no operator ran in it, and none read a parameter of it"

    def _note_run(self, context: OpContext) -> None:
        """Record where an operator ran, and of which other modules it read parameters."""
        path = context.module_path
        parts = context.get("parts_not_seen")
        if self._ran.setdefault(path, None) is None and parts is not None:
            self._ran[path] = f"{context.name} ({parts})"
        for weight in context.weights.values():
            owner = weight.name.rpartition(".")[0]
            if owner != path:
                self._readers.setdefault(owner, context.name)

    def _note_match(self, kind: str, test: Callable[[str], bool]) -> None:
        for key in self._patterns:
            if key[0] == kind and not self._patterns[key] and test(key[1]):
                self._patterns[key] = True

    def _begin_call(self, call: Call) -> None:
        self._span = span_of(call, self._places.by_row)

    def _end_call(self, call: Call) -> None:
        self._span = None
        unmatched = [pattern for kind, pattern in self._unmatched() if kind == "modules"]
        if not unmatched or call.module in self._asked:
            return
        self._asked.add(call.module)
        paths = sorted(call.held())
        for pattern in unmatched:
            if path := next(filter(matcher((pattern,)), paths), ""):
                self._idle[pattern] = path
