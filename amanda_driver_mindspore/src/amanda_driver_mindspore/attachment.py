"""`MindsporeAttachment`: attaches one session to MindSpore.

Owns what is done at each call that `interception` passes on, and which calls are ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mindspore
from mindspore import Tensor

from amanda_core.driver_kit import Session, inside_routine
from amanda_core.interface import CoverageGap
from amanda_driver_mindspore.execution.compiled import CompiledPrograms
from amanda_driver_mindspore.execution.eager import Call, PyNativeProgram
from amanda_driver_mindspore.facts import FACTS
from amanda_driver_mindspore.gradients import finish
from amanda_driver_mindspore.interception import ROUTES
from amanda_driver_mindspore.mindspore_internals.cells import OPTIMIZERS, recomputed_cell
from amanda_driver_mindspore.mindspore_internals.doors import names_of
from amanda_driver_mindspore.mindspore_internals.programs import (
    SWITCHES,
    function_of,
    is_graph_mode,
)
from amanda_driver_mindspore.mindspore_internals.tape import is_recording, stop_recording
from amanda_driver_mindspore.oracle import Oracle
from amanda_driver_mindspore.vocabulary import DECLARATIONS, is_quiet, written

__all__ = ["MindsporeAttachment"]

EAGER = f"mindspore/{mindspore.__version__}/eager"


class MindsporeAttachment:
    """Instruments the operators of one thread.

    A method for a door or a boundary takes the function of MindSpore that it replaces as
    `original`, and the arguments of its call. It returns what the program gets from the call.
    """

    facts = FACTS

    def __init__(self, session: Session) -> None:
        self.session = session
        self._eager = PyNativeProgram(session, EAGER)
        self._compiled = CompiledPrograms(self._eager)
        self.enter_zone = self._eager.enter_zone
        self.oracle = Oracle(self._eager)
        session.at_close(self.detach)
        ROUTES.attach(self)
        self.oracle.enter()

    def enter_thread(self) -> None:
        """Instrument the calling thread, after another one, which has ended."""
        ROUTES.move(self)
        self.oracle.enter()

    def ask(self) -> None:
        """Do nothing: each operator of a thread without an attachment calls `join` anyway."""

    def detach(self) -> None:
        """Restore the functions that were found."""
        ROUTES.detach(self)
        self.oracle.leave()

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what is not instrumented, and why."""
        return [*DECLARATIONS.gaps(), *self.oracle.gaps()]

    # Doors, by their forms.

    def pyboost(self, original: Callable[..., Any], primitive: Any, values: Sequence[Any]) -> Any:
        """Execute a generated operator that is called through a function ``pyboost_*``.

        Args:
            original: The function, which takes the primitive and a list of values.
            primitive: The operator.
            values: The arguments of the operator.
        """
        op_type = primitive.name
        return self._execute(op_type, values, lambda new: original(primitive, list(new)))

    def run_op(
        self,
        original: Callable[..., Any],
        executor: Any,
        primitive: Any,
        name: str,
        values: Sequence[Any],
    ) -> Any:
        """Execute an operator that has no generated `pyboost_` function.

        Args:
            original: MindSpore's `_PyNativeExecutor.run_op_async`, unbound.
            executor: The executor on which it is called.
            primitive: The operator, with its attributes.
            name: The type of the operator.
            values: The arguments of the operator.
        """
        attrs = dict(primitive.attrs)
        names = tuple(attrs.pop("input_names", ()))
        attrs.pop("output_names", None)

        def run(new: Sequence[Any]) -> Any:
            return original(executor, primitive, name, tuple(new))

        return self._execute(name, values, run, names, attrs)

    def primitive(
        self, op_type: str, original: Callable[..., Any], operator: Any, values: Sequence[Any]
    ) -> Any:
        """Execute a generated operator that is an object of C++.

        Args:
            op_type: The type of the operator.
            original: The ``__call__`` of the object's class, unbound. It takes the object and a
                list of values.
            operator: The object.
            values: The arguments of the call, without the object.
        """
        return self._execute(op_type, values, lambda new: original(operator, list(new)))

    def functional(
        self, op_type: str, original: Callable[..., Any], operator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Execute an operator with several signatures, such as that of `mindspore.mint.add`.

        Args:
            op_type: The type of the operator.
            original: The ``__call__`` of the class of its object, unbound.
            operator: The object.
            *args: The positional arguments of the call, without the object.
            **kwargs: Its arguments by name. Those without tensors are attributes.
        """
        return self._with_names(op_type, partial(original, operator), args, kwargs)

    def method(self, op_type: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Execute a method of tensors.

        Args:
            op_type: The name of the method.
            original: The method, unbound.
            *args: The tensor, and the positional arguments.
            **kwargs: The arguments by name. Those without tensors are attributes.
        """
        return self._with_names(op_type, original, args, kwargs)

    def _with_names(
        self,
        op_type: str,
        original: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if not kwargs:
            return self._execute(op_type, args, lambda new: original(*new))
        named = {name: value for name, value in kwargs.items() if _holds_tensor(value)}
        attrs = {name: value for name, value in kwargs.items() if name not in named}
        count = len(args)

        def run(new: Sequence[Any]) -> Any:
            return original(*new[:count], **dict(zip(named, new[count:], strict=True)), **attrs)

        names = (*[""] * count, *named) if named else ()
        return self._execute(op_type, [*args, *named.values()], run, names, attrs)

    def _execute(
        self,
        op_type: str,
        values: Sequence[Any],
        run: Callable[[Sequence[Any]], Any],
        names: tuple[str, ...] | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not self.session.enabled or is_quiet(op_type):
            return run(values)
        if names is None:
            names = names_of(op_type)
            names = names if len(names) == len(values) else ()
        places = written(op_type, len(values))
        return self._eager.execute(Call(op_type, values, run, names, attrs, places))

    # Boundaries.

    def call(self, original: Callable[..., Any], cell: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a cell, whose path its operators have."""
        session, eager = self.session, self._eager
        if not session.enabled:
            return original(cell, *args, **kwargs)
        if isinstance(cell, OPTIMIZERS):
            return self._step(original, cell, *args, **kwargs)
        inner = recomputed_cell(cell)
        if inner is None:
            return self._call(original, cell, cell, *args, **kwargs)
        # The cell's own call is running, unless the backward program recomputes it.
        around = eager.scope
        if inner is cell or not eager.backward or eager.scopes.enter(inner, around, True) is around:
            return original(cell, *args, **kwargs)
        return self.recompute(self._call, original, cell, inner, *args, **kwargs)

    def _call(
        self, original: Callable[..., Any], cell: Any, inner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a cell in the scope of `inner`, which it stands for, or is itself."""
        with self._eager.calling(inner, args, kwargs, again=self._eager.backward > 0):
            if not is_graph_mode():
                return original(cell, *args, **kwargs)
            run = partial(original, cell, *args, **kwargs)
            return self._compiled.run(cell, run, run, (*args, *kwargs.values()))

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call an optimizer, which ends a step; without tools, since it is a compiled program."""
        with inside_routine(), SWITCHES.as_found():
            result = original(*args, **kwargs)
        self.session.end_step()
        return result

    def run_compiled(
        self, original: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a function of `mindspore.jit`."""
        if not self.session.enabled:
            return original(executor, *args, **kwargs)
        function = function_of(executor)
        return self._compiled.run(
            function,
            partial(function, *args, **kwargs),
            partial(original, executor, *args, **kwargs),
            (*args, *kwargs.values()),
        )

    def is_tracing(self, original: Callable[..., Any]) -> Any:
        """Return True where a function is not to be traced: while tools are applied."""
        return original() or (self.session.enabled or None)

    def backward(self, original: Callable[..., Any], *args: Any) -> Any:
        """Run a backward program, which may recompute cells."""
        self._eager.backward += 1
        try:
            result = original(*args)
            finish(self._eager.unfinished)
            return result
        finally:
            self._eager.backward -= 1
            self._eager.unfinished.clear()  # After an exception.
            if not self._eager.backward:
                self._eager.recomputed = 0

    def record(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a program whose operators the tape records, and return its result.

        An exception goes on to the caller. If it ends the outermost such program, what the tape
        has recorded is dropped first, as MindSpore does not do.

        Args:
            original: MindSpore's function, which records and runs the program.
            *args: Its positional arguments.
            **kwargs: Its arguments by name.
        """
        is_outermost = not is_recording()
        try:
            return original(*args, **kwargs)
        except BaseException:
            if is_outermost:
                stop_recording()
            raise

    record_product = record

    def recompute(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a cell again."""
        self._eager.recomputed += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._eager.recomputed -= 1

    def recomputing(self, original: Callable[..., Any], executor: Any, begins: bool) -> Any:
        """Note that the backward program of a cell begins or ends to compute it again."""
        self._eager.recomputed += 1 if begins else -1
        return original(executor, begins)


ROUTES.attachment = MindsporeAttachment


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(isinstance(one, Tensor) for one in value)
    return isinstance(value, Tensor)
