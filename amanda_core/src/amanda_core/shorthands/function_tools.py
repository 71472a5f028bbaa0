"""Tools made of one function and a pattern, without a class: `look`, `edit` and `on`.

Owns what a pattern means where it may stand for a module or for an operator, and the warning if
nothing matched. The tools are ordinary ones.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from amanda_core.engine.action import Positions, Routine
from amanda_core.engine.context import OpContext
from amanda_core.engine.selection import Pattern, Patterns, Selection, listed, select
from amanda_core.engine.tool import Analysis, Tool
from amanda_core.errors import ActionError, SelectionError
from amanda_core.runtime.warning_locations import warn

__all__ = ["edit", "look", "on"]

#: What paths of modules, types and names of operators consist of, and globs of them.
_FORM = re.compile(r"[\w.\-/:#<>*?!\[\]]+")
#: How many names a tool remembers for its warning, and how many the warning has.
_REMEMBERED, _NAMED = 2000, 5


def look(
    pattern: Patterns,
    function: Routine,
    *,
    inputs: Positions = None,
    outputs: Positions = None,
    module: Patterns = (),
    everything: bool = False,
    logical: bool = False,
) -> Tool:
    """Return a tool that calls a function with values of operators, and changes nothing.

    Args:
        pattern: Patterns, one of which must match the path of the operator's module, or the type,
            common type or name of the operator. A pattern is a glob, whose ``*`` matches any
            characters, or a compiled regular expression.
        function: Called each time the operator runs, with one argument for each position. What it
            returns is ignored. If it has a parameter ``name``, it gets the operator's name there.
        inputs: Positions of the inputs that it gets, before the operator runs.
        outputs: Positions of the outputs that it gets, after the operator has run. Without
            `inputs` and `outputs` it gets all outputs.
        module: Patterns, one of which must match the path of the module as well.
        everything: Include operators outside the model, such as those of an optimizer.
        logical: Give it values that processes hold in parts as a whole. See
            `OpContext.insert_before_op`.

    Raises:
        ActionError: `function` cannot be called, or both `inputs` and `outputs` are given.
        SelectionError: A pattern is neither the path of a module nor a type of operators.

    >>> means = {}
    >>> def note(output, name):
    ...     means.setdefault(name, []).append(output.mean())
    >>> tool = look("encoder.layer.3.*", note)
    >>> tool.tool_name
    "look('encoder.layer.3.*', note)"
    """

    @functools.wraps(function)
    def ignoring(*values: Any, **names: Any) -> None:
        function(*values, **names)

    _check(function, inputs, outputs, "look")
    how = {"observe": True, "logical": logical}
    return _inserting("look", pattern, module, everything, ignoring, inputs, outputs, **how)


def edit(
    pattern: Patterns,
    function: Routine,
    *,
    inputs: Positions = None,
    outputs: Positions = None,
    module: Patterns = (),
    everything: bool = False,
) -> Tool:
    """Return a tool that replaces values of operators by what a function returns.

    Args:
        pattern: As for `look`.
        function: Called each time the operator runs, with one argument for each position. It
            returns the new value, or a list of values for several positions. None leaves them. If
            it has a parameter ``name``, it gets the operator's name there.
        inputs: Positions of the inputs to replace, before the operator runs.
        outputs: Positions of the outputs to replace, after the operator has run. Without `inputs`
            and `outputs` these are all outputs.
        module: Patterns, one of which must match the path of the module as well.
        everything: Include operators outside the model, such as those of an optimizer.

    Raises:
        ActionError: `function` cannot be called, or both `inputs` and `outputs` are given.
        SelectionError: A pattern is neither the path of a module nor a type of operators.

    >>> halved_weights = edit("conv2d", lambda weight: weight * 0.5, inputs=[1])
    """
    _check(function, inputs, outputs, "edit")
    return _inserting("edit", pattern, module, everything, function, inputs, outputs)


def on(
    pattern: Patterns,
    *,
    module: Patterns = (),
    backward: bool = False,
    require_outputs: bool = False,
    everything: bool = False,
) -> Callable[[Analysis], Tool]:
    """Return a decorator that makes a tool of an analysis routine.

    Args:
        pattern: As for `look`.
        module: Patterns, one of which must match the path of the module as well.
        backward: Whether the routine is for operators of the backward program.
        require_outputs: Whether it is called after the operator has run instead of before.
        everything: Include operators outside the model, such as those of an optimizer.

    Raises:
        SelectionError: A pattern is neither the path of a module nor a type of operators.

    >>> @on("linear", module="decoder.*")
    ... def shapes(context):
    ...     print(context.name, context.get_inputs()[0].shape)
    >>> shapes.tool_name
    "on('linear', shapes)"
    """
    _selection(pattern, module)  # Refused at the decorator and not below it.

    def decorate(analyse: Analysis) -> Tool:
        tool = _Matching("on", pattern, module, everything, analyse)
        tool.add_inst_for_op(tool.analyse, backward, require_outputs)
        return tool

    return decorate


class _Matching(Tool):
    """A tool whose analysis routine is called for the operators that patterns select."""

    # The user means the operators inside of fused ones, too.
    whole = True

    def __init__(
        self,
        kind: str,
        pattern: Patterns,
        module: Patterns,
        everything: bool,
        analyse: Analysis,
        function: Routine | None = None,
    ) -> None:
        self._check_callable(analyse, kind)
        shown = function or analyse
        name = getattr(shown, "__name__", None) or repr(shown)
        self._text = f"{kind}({pattern!r}, {name})"
        self._selected, self._patterns = _selection(pattern, module)
        self._everything, self._routine = everything, analyse
        self._found = False
        #: What operators there were, while none was selected.
        self._ran: dict[str, None] = {}
        self.add_inst_for_end(self._end)

    @property
    def tool_name(self) -> str:
        """Name in messages: as in the program."""
        return self._text

    def analyse(self, context: OpContext) -> None:
        """Call the routine if the operator is selected."""
        if not self._everything and context.zone != "model":
            return
        if self._selected(context):
            self._found = True
            self._ran.clear()
            self._routine(context)
        elif not self._found and len(self._ran) < _REMEMBERED:
            names = context.op_type, context["type"], context.name, context.module_path
            self._ran.update(dict.fromkeys(name for name in names if name))

    def _end(self) -> None:
        if self._found or not self._ran:
            return
        ran = list(self._ran)
        close = [
            name
            for pattern in self._patterns
            if isinstance(pattern, str)
            for name in difflib.get_close_matches(pattern, ran, 1, 0.6)
        ]
        meant = f"Did you mean {close[0]!r}? " if close else ""
        some = ", ".join([*ran[:_NAMED], *(["..."] if len(ran) > _NAMED else [])])
        warn(f"{self._text} was given no operator. {meant}There were {some}")


def _inserting(
    kind: str,
    pattern: Patterns,
    module: Patterns,
    everything: bool,
    function: Routine,
    inputs: Positions,
    outputs: Positions,
    **how: bool,
) -> Tool:
    """Return a tool that inserts a function before or after the selected operators."""
    named = _takes_name(function)

    def analyse(context: OpContext) -> None:
        more: dict[str, Any] = {**how, "name": context.name} if named else how
        if inputs is not None:
            context.insert_before_op(function, inputs=inputs, **more)
        else:
            context.insert_after_op(function, outputs=outputs, **more)

    tool = _Matching(kind, pattern, module, everything, analyse, function)
    tool.add_inst_for_op(tool.analyse)
    return tool


def _takes_name(function: Routine) -> bool:
    try:
        found = inspect.signature(function).parameters.get("name")
    except (TypeError, ValueError):  # It is written in C.
        return False
    return found is not None and found.kind is not found.POSITIONAL_ONLY


def _check(function: Routine, inputs: Positions, outputs: Positions, kind: str) -> None:
    if not callable(function):
        raise ActionError(
            f"{function!r} cannot be called",
            where=f"amanda.{kind}",
            fix=f"Pass a function: amanda.{kind}('linear', function)",
        )
    if inputs is not None and outputs is not None:
        raise ActionError(
            "Both inputs and outputs are given",
            where=f"amanda.{kind}",
            fix="Make two tools, one for the inputs and one for the outputs",
        )


def _selection(pattern: Patterns, module: Patterns) -> tuple[Selection, tuple[Pattern, ...]]:
    patterns = listed("pattern", pattern)
    if not patterns:
        raise SelectionError("No pattern is given", fix="Write '*' for all operators")
    for one in (*patterns, *listed("module", module)):
        if isinstance(one, str) and _FORM.fullmatch(one) is None:
            raise SelectionError(
                f"{one!r} is neither the path of a module nor a type of operators",
                fix="Write a path such as 'encoder.layer.3.*' or a type such as 'conv2d'",
            )
    selected = select(op=patterns) | select(module=patterns)
    return (selected & select(module=module) if module else selected), patterns
