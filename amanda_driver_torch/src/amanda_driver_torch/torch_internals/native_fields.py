"""The objects from which the extension makes watches and programs.

Owns their fields, which `native/fields.h` lists, too. C reads each of them once, by attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from amanda_core.driver_kit import OpContext, Session, Step

__all__ = ["GradientFields", "ProgramFields", "WatchFields"]

#: A function, and the same one hidden from the program's function modes.
_Ways: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]
#: The number of an argument, and the number of an item in it or -1.
_Place: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class WatchFields:
    """How a watch, `native.Watch`, reaches its session.

    Attributes:
        session: The session.
        get_control: Returns the `Control` of the calling thread.
        execute: Executes one call of an operator.
        settle: Analyses the backward nodes of an operator without actions.
        resume: Goes on with a call where a program has stopped.
        edit: Applies the result of a routine to the values of a call.
        saved_tensors: Makes a saved tensor, or None; and returns the hooks on saved tensors.
        failed: Takes an error of the driver and the type of an op: raises it, or lists the op.
        call_module: Calls a module.
        enter_module: Returns the scope of a module's call.
        module_failed: Takes the error of a module's call.
        scopes: The scopes of modules.
        raise_pending: Raises the first of the errors that wait.
        pending: These errors.
        annotate: Adds a note about a step to its error.
        tap: Returns identities of values whose gradients go to a function.
        weakly: Returns the weak form of a value.
        weak_value: Returns the weak form of a tensor.
        memoized: The type of routines whose results may be used again.
        classify: Returns what the rule of identity makes of a code object.
        look_up: Returns the record of a known op.
        resolve: Returns the record of a new one.
        region: Returns a number for the region of a weight.
        is_weight: Tells whether a tensor is a weight, hidden from function modes.
        record_type: The type of records, which has slots.
        parameter_type: That of parameters.
        tensor_type: That of plain tensors.
    """

    session: Session
    get_control: Callable[[], Any]
    execute: _Ways
    settle: _Ways
    resume: _Ways
    edit: Callable[..., Any]
    saved_tensors: tuple[Callable[..., Any] | None, Callable[[bool], Any]]
    failed: Callable[[Exception, str], None]
    call_module: Callable[..., Any]
    enter_module: Callable[..., Any]
    module_failed: Callable[..., Any]
    scopes: Any
    raise_pending: Callable[[], None]
    pending: list[BaseException]
    annotate: Callable[[Step, BaseException], None]
    tap: Callable[..., Any]
    weakly: Callable[[Any], Any]
    weak_value: Callable[[Any], Any]
    memoized: type
    classify: Callable[..., Any]
    look_up: Callable[..., Any]
    resolve: _Ways
    region: _Ways
    is_weight: Callable[[Any], bool]
    record_type: type
    parameter_type: type
    tensor_type: type


# Its fields are set one by one, since a call with keywords takes longer than making the program.
@dataclass(slots=True, init=False)
class ProgramFields:
    """The plan of one op, for calls like the one for which it is made.

    Attributes:
        epoch: The epoch in which it is valid.
        watch: The `native.Watch` of the session.
        context: The op's context.
        execution: The context's data of one execution.
        operands: The arguments of the call: other calls must have arguments of the same types.
        keywords: The names of the last ones.
        sources: Position of the signature -> number of the argument, or -1 for its default.
        defaults: Position -> default.
        spread: The position that takes all positional arguments from its source on, or -1.
        fixed: Numbers of arguments with the only values that it fits.
        outs: Numbers of arguments that are destinations (``out=``).
        before: Steps before the forward op.
        after: Steps after it.
        outputs: Number of outputs.
        nodes: Number of nodes that the op makes if these need no hooks; else -1.
        with_gradients: Whether it also fits calls with gradients.
        writes: The positions that the op writes, or None.
        aliases: Whether outputs may be inputs, or views of them.
        assigns: Whether the op is ``x[i] = v``, which returns nothing.
        gradients: The actions on its gradients, or None.
    """

    epoch: object
    watch: Any
    context: OpContext
    execution: dict[str, Any]
    operands: tuple[Any, ...]
    keywords: tuple[str, ...]
    sources: tuple[int, ...]
    defaults: tuple[Any, ...]
    spread: int
    fixed: list[tuple[int, Any]]
    outs: tuple[int, ...]
    before: Sequence[Step]
    after: Sequence[Step]
    outputs: int
    nodes: int
    with_gradients: bool
    writes: frozenset[int] | None
    aliases: bool
    assigns: bool
    gradients: GradientFields | None


@dataclass(slots=True)
class GradientFields:
    """The actions of a program on the gradients of its op as a whole.

    Attributes:
        taps: Functions that take gradients of inputs from identities, with these inputs.
        required: The tensors among the arguments, and whether each requires a gradient.
        lengths: The lengths of arguments that are lists.
        arrivals: Which outputs have nodes, and the hooks for their gradients; or None.
        nodes: The nodes that compute the gradients of inputs, and hooks for them: how many nodes
            the op makes, a function that tells whether autocast is active or None, the layouts on
            which the nodes depend, and for each hook the arguments whose shapes it needs. Or None.
        in_place: Whether the gradient of what the op writes is that of no view.
        saved_hooks: Returns the program's hooks on saved tensors, where none may be active. None if
            they do not matter.
    """

    taps: list[tuple[Any, list[_Place]]]
    required: list[tuple[int, int, bool]]
    lengths: list[tuple[int, int]]
    arrivals: tuple[list[bool], list[Any]] | None
    nodes: tuple[int, Callable[[], bool] | None, list[Any], list[Any]] | None
    in_place: bool = False
    saved_hooks: Callable[[bool], Any] | None = None
