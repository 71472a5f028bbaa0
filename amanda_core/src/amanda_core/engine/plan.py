"""`Plan`: the steps to execute at one point of one op, in order.

Owns how a routine is called, what its result means and what the error says when it fails. Drivers
execute nothing but plans: they call the plan (`plan(values)`), or call its steps one by one. Values
are opaque here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from amanda_core.engine.action import Action
from amanda_core.errors import ObserverResultError, PositionError, RoutineResultError, annotate
from amanda_core.runtime.switches import ROUTINE_DEPTH
from amanda_core.runtime.threads import THREAD

if TYPE_CHECKING:
    from amanda_core.engine.context import OpContext

__all__ = ["EMPTY", "Plan", "Step"]

#: Seconds after which a routine runs although one of its tool runs in another thread.
_PATIENCE = 10.0


class Step:
    """One action bound to its op.

    Attributes:
        action: The action: its kind, positions, routine, keyword arguments, tool, flags.
    """

    __slots__ = ("_context", "_skip_none", "action")

    def __init__(self, action: Action, context: OpContext) -> None:
        self.action = action
        self._context = context
        # A gradient that does not exist is None, and a routine is not called for it.
        self._skip_none = action.kind.on_backward and not action.kind.is_replacement

    def __repr__(self) -> str:
        return f"<Step {self.where}>"

    @property
    def op_name(self) -> str:
        """Readable name of the op."""
        return self._context.name

    @property
    def where(self) -> str:
        """Tool, routine and op, for messages."""
        action = self.action
        return (
            f"{action.kind.value} by tool {action.tool.tool_name}, "
            f"routine {action.routine_name}, {self._context.where}"
        )

    @property
    def turn(self) -> Any:
        """The lock that its routine holds; None unless several threads run routines of its tool.

        A replacement runs the op, which may wait for another thread, so it holds none.
        """
        turn = self.action.tool._amanda.turn
        return None if turn is None or self.action.kind.is_replacement else turn

    def __call__(self, values: Sequence[Any]) -> list[tuple[int, Any]]:
        """Call the routine with its selection of `values`.

        Returns:
            The changed positions with their new values; empty if nothing changed. A value that is
            the same object counts as unchanged.

        Raises:
            PositionError: A selected position does not exist.
            RoutineResultError: The routine returned a wrong number of values.
            ObserverResultError: The routine is an observer, but returned something.
            BaseException: Whatever the routine raised, with a note.
        """
        positions, selected = self._select(values)
        if self._skip_none and selected and all(value is None for value in selected):
            return []
        if not selected and self.action.positions:
            return []  # This execution has no such outputs.
        result = self._call(selected)
        return [] if result is None else self._changes(positions, selected, result)

    def changes(self, values: Sequence[Any], result: Any) -> list[tuple[int, Any]]:
        """Return which of `values` change by the result of a routine that the driver called itself.

        Raises:
            RoutineResultError: The result has a wrong number of values.
        """
        return self._changes(*self._select(values), result)

    def _changes(
        self, positions: Sequence[int], selected: list[Any], result: Any
    ) -> list[tuple[int, Any]]:
        if result is None:
            return []
        if self.action.observe:
            raise ObserverResultError(
                f"An observer returned {type(result).__name__}, not None",
                where=self.where,
                fix="Return nothing, or leave out observe=True if the routine edits",
            )
        self.action.tool._amanda.returned = True
        found = zip(positions, selected, self._as_many(result, selected), strict=True)
        changed = [(position, new) for position, old, new in found if new is not old]
        if changed:
            self._context._note_edits(self.action, changed)
        return changed

    def replace(self, values: Sequence[Any], empty: bool = False) -> Any:
        """Call a replacement and return its result unchanged, as the result of the op.

        Args:
            values: What the op would have got.
            empty: Whether the op itself returns nothing.

        Raises:
            RoutineResultError: The routine returned None, and the op would not have.
        """
        result = self._call(self._select(values)[1])
        if result is None and not empty:
            raise RoutineResultError(
                "A replacement returned None",
                where=self.where,
                fix="Return what the op would have returned",
            )
        self.action.tool._amanda.returned = True
        return result

    def _select(self, values: Sequence[Any]) -> tuple[Sequence[int], list[Any]]:
        """Return the positions that the routine gets, and the values there."""
        positions = self.action.positions
        if positions is None:
            return range(len(values)), list(values)
        try:
            return positions, [values[position] for position in positions]
        except IndexError:
            if self.is_left_out(len(values)):
                return (), []
            raise PositionError(
                f"Position {max(positions)} was requested, but there are {len(values)} "
                f"{self.action.kind.selects}, counted from 0",
                where=self.where,
                fix="Request existing positions, or leave them out to request all",
            ) from None

    def is_left_out(self, count: int) -> bool:
        """Return True if the routine is skipped where an op such as `split` has `count` outputs.

        An observer is skipped if any output that it requests is missing, an editor if all are.
        """
        if not self._context._outputs_vary or "outputs" not in self.action.kind.selects:
            return False
        missing = [position >= count for position in self.action.positions or ()]
        return any(missing) if self.action.observe else bool(missing) and all(missing)

    def _call(self, selected: list[Any]) -> Any:
        # Faster than `with inside_routine()`: this runs at every execution of an op.
        switches, turn = THREAD.control.switches, self.action.tool._amanda.turn
        depth = switches[ROUTINE_DEPTH]
        if turn is not None and (turn := self.turn) is not None:
            # A routine may wait for a thread whose routines wait for it.
            turn = turn if turn.acquire(timeout=_PATIENCE) else None
        try:
            switches[ROUTINE_DEPTH] = depth + 1
            result = self.action.routine(*selected, **self.action.kwargs)
            switches[ROUTINE_DEPTH] = depth  # Not in `finally`, which an exception may skip.
            return result
        except BaseException as error:
            switches[ROUTINE_DEPTH] = depth
            annotate(error, f"In {self.where}")
            raise
        finally:
            if turn is not None:
                with suppress(RuntimeError):  # A routine may remove its tool, which releases it.
                    turn.release()

    def _as_many(self, result: Any, selected: list[Any]) -> Sequence[Any]:
        many = result if isinstance(result, (tuple, list)) else (result,)
        got, wanted = len(many), len(selected)
        if many is result and wanted == 1 and isinstance(selected[0], (tuple, list)):
            # The position is itself a list of tensors. A sequence is its new value, unless it holds
            # another sequence as its only element.
            return many if got == 1 and isinstance(many[0], (tuple, list)) else (result,)
        if got == wanted:
            return many
        raise RoutineResultError(
            f"A routine returned {got} value{'s' if got != 1 else ''}, but was given {wanted}",
            where=self.where,
            fix=f"Return None for no change, or {wanted} value{'s' if wanted != 1 else ''}",
        )


class Plan:
    """The steps of one op at one point, in tool order, and at most one replacement.

    A false plan has nothing to do.

    Attributes:
        steps: Insertions in order.
        replacement: What runs instead of the op, after the steps before it; or None.
    """

    __slots__ = ("replacement", "steps")

    def __init__(self, steps: Sequence[Step] = (), replacement: Step | None = None) -> None:
        self.steps = tuple(steps)
        self.replacement = replacement

    def __bool__(self) -> bool:
        return bool(self.steps) or self.replacement is not None

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def edits(self) -> bool:
        """True if anything in the plan may change a value: a replacement, or a step that edits."""
        return self.replacement is not None or not all(step.action.observe for step in self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __repr__(self) -> str:
        return f"<Plan of {len(self.steps)} steps{' and a replacement' * bool(self.replacement)}>"

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Run the steps in order, each on the values that the earlier ones returned."""
        new = list(values)
        for step in self.steps:
            for position, value in step(new):
                new[position] = value
        return new


#: The plan of a point at which nothing is to be done.
EMPTY = Plan()
