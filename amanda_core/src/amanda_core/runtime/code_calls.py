"""What the code of functions calls, read from bytecode without running it.

A guess, for warnings: names of methods decide, whatever object they belong to.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from inspect import CO_VARARGS
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

__all__ = ["Calls", "functions_in"]


def functions_in(routine: Any) -> Iterator[FunctionType]:
    """Yield the function of a routine, and the functions that it closes over."""
    function = routine.__func__ if isinstance(routine, MethodType) else routine
    if isinstance(function, FunctionType):
        yield function
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # The cell is empty.
                yield from functions_in(cell.cell_contents)


class Calls(NamedTuple):
    """The calls by which code asks for routines that change values.

    Attributes:
        editing: Methods that always do.
        inserting: Methods that do unless they get the keyword `observing`.
        observing: The name of that keyword.
        methods: Methods that may be the routine, by their names.
    """

    editing: Set[str]
    inserting: Set[str]
    observing: str
    methods: Mapping[str, FunctionType]

    def may_edit(self, code: CodeType) -> bool:
        """Return True if code, or code in it, asks for routines that may change values."""
        names, inner = set(code.co_names), [c for c in code.co_consts if type(c) is CodeType]
        if names & self.editing:
            return True
        # The names of keyword arguments are constants of the code.
        observes = any(type(c) is tuple and self.observing in c for c in code.co_consts)
        if names & self.inserting and not observes:
            called = [(one, 0) for one in inner]
            called += [(one.__code__, 1) for name, one in self.methods.items() if name in names]
            return not called or any(_reads_arguments(one, skipped) for one, skipped in called)
        return any(map(self.may_edit, inner))


def _reads_arguments(code: CodeType, skipped: int) -> bool:
    """Return True if a routine reads the values that it gets: one that only counts does not."""
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    read = {one.argval for one in dis.get_instructions(code)}
    return not read.isdisjoint(code.co_varnames[skipped:count])
