"""Routines on the host: custom operators that call Python out of a compiled graph.

Owns the operators and the table of the functions that they call. They are effects: a compiler
neither drops nor merges nor reorders them, in forward and backward graphs. A routine that is
differentiated leaves its autograd graph on the host, at a tensor that the compiled program saves
for its backward program.
"""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from amanda_core.driver_kit import Session, Step
from amanda_core.interface import RoutineResultError, UnsupportedError
from amanda_driver_torch.compiled.functions import recorded
from amanda_driver_torch.compiled.selection import Selection
from amanda_driver_torch.threads.modes import call_routine
from amanda_driver_torch.torch_internals.dynamo import effectful
from amanda_driver_torch.torch_internals.internals import users_of_storage

__all__ = ["Host", "Like", "Row", "like_of"]

#: Shape, dtype and device of a result.
Like = tuple[tuple[int, ...], torch.dtype, torch.device]

# Another name in every process, so that no compiled graph in a cache has these operators.
_NAME = f"amanda_{os.getpid()}_{os.urandom(4).hex()}"
_LIBRARY = torch.library.Library(_NAME, "DEF")  # type: ignore[no-untyped-call]
_CALLS: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


#: id of a step of the first place that shares code -> the step of another one.
Steps = dict[int, Step]


class Row:
    """The number of one of the places that share code.

    Attributes:
        index: The number.
        given: What the code gets of the place: the number as a tensor, and the tensors to which
            its staged routines refer.
        held: What lives as long.
    """

    held: Sequence[weakref.ref[Any]] = ()

    def __init__(self) -> None:
        self.index = next(_NUMBERS)
        self.given: tuple[torch.Tensor, ...] = (torch.tensor(self.index, device="cpu"),)


class _Call:
    """A function of a graph on the host.

    Attributes:
        run: Called with the tensors and the values of symbolic numbers.
        likes: Those of its results, if they are not like its tensors.
    """

    def __init__(self, run: Callable[..., Any], likes: Sequence[Like] = ()) -> None:
        self.run, self.likes = run, likes


class Host:
    """The functions on the host of all graphs of one store.

    Attributes:
        session: The running session of the store, or the last one.
        held: What graphs refer to weakly.
        rows: Number of a row -> its steps.
    """

    session: Session

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.held: list[object] = []
        self.rows: dict[int, Steps] = {}
        #: The number of the row whose routines run, as a value of the graph.
        self._row: torch.Tensor | None = None

    def in_row(self, row: torch.Tensor) -> Host:
        """Return the same host, whose routines are those of a row."""
        return _InRow(self, row)

    def observe(self, step: Step, values: Sequence[Any]) -> None:
        """Add a routine that only looks."""
        selection = Selection(step, values)
        if selection.tensors or not selection.is_empty:
            number = self._add(_Call(lambda *given: self._run(step, selection, given)))
            tensors, numbers = self._take(selection)
            # Inductor writes an operator without a device before kernels that wait to be written,
            # and frees what these read.
            _OPS.observe(tensors or [torch.empty(0)], numbers, number)

    def edit(
        self, step: Step, values: Sequence[Any], autodiff: bool = False
    ) -> list[tuple[int, Any]]:
        """Add a routine whose results the graph uses; return the positions with its results.

        Args:
            step: The routine's step.
            values: The values that it selects from.
            autodiff: Whether it is differentiated.
        """
        selection = Selection(step, values)
        if not selection.tensors:
            self.observe(step, values)
            return []

        def run(tensors: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
            changes = self._run(step, selection, (tensors, numbers), autodiff)
            results = list(tensors)  # And the row.
            for position, new in changes or ():
                if position not in selection.places:
                    raise _unsupported(step, "changes a value that is not a tensor")
                places = selection.places[position]
                many = list(new) if isinstance(new, (tuple, list)) else [new]
                if len(many) != len(places):
                    raise _unsupported(step, "changes the number of tensors in a list")
                for place, value in zip(places, many, strict=True):
                    results[place] = _fitting(step, value, like_of(tensors[place]))
            return results

        if autodiff and selection.wants_gradients:
            found = self._differentiated(run, selection, [like_of(t) for t in selection.tensors])
        else:
            number = self._add(_Call(run))
            found = _OPS.edit(*self._take(selection), number)
        return selection.results(values, found)

    def replace(
        self, step: Step, values: Sequence[Any], likes: Sequence[Like], autodiff: bool = False
    ) -> list[Any]:
        """Add a routine that computes something else; return its results.

        Args:
            step: A replacement.
            values: What it gets.
            likes: Those of its results.
            autodiff: Whether it is differentiated.
        """
        selection = Selection(step, values)

        def run(tensors: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
            if self.session.closed:
                raise UnsupportedError(
                    "The tool that replaces a computation is no longer applied",
                    where=step.where,
                    fix="Call backward inside `apply`",
                )
            found = call_routine(step.replace, selection.whole(tensors, numbers), autodiff)
            many = list(found) if isinstance(found, (tuple, list)) else [found]
            many = [value for value in many if value is not None]
            if len(many) != len(likes):
                raise RoutineResultError(
                    f"A replacement returned {len(many)} values, but the compiled graph has "
                    f"{len(likes)} there",
                    where=step.where,
                    fix="Return as many values as the op does",
                )
            return [_fitting(step, v, like) for v, like in zip(many, likes, strict=True)]

        if autodiff and selection.wants_gradients:
            return self._differentiated(run, selection, likes)
        number = self._add(_Call(run, likes))
        return list(_OPS.compute(*selection.take(), number))

    def _differentiated(
        self, run: Callable[..., Any], selection: Selection, likes: Sequence[Like]
    ) -> list[Any]:
        """Add a function on the host whose backward is that of the operators that it calls."""
        wanted = [i for i, tensor in enumerate(selection.sources) if tensor.requires_grad]
        device = selection.tensors[0].device

        def record(tensors: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
            given = [tensor.detach() for tensor in tensors]
            leaves = [given[i].requires_grad_() for i in wanted]
            with torch.enable_grad():
                results = run(given, numbers)
            graph = torch.empty(0, device=device)
            # Of the tensor itself the program may save an alias.
            graph.untyped_storage().amanda_recorded = leaves, results  # type: ignore[attr-defined]
            return [*(result.detach() for result in results), graph]

        def derive(tensors: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
            graph, *gradients = tensors
            found = getattr(graph.untyped_storage(), "amanda_recorded", None)
            if found is None:
                raise UnsupportedError(
                    "The graph of a routine that is differentiated is lost: a hook of saved "
                    "tensors copies what a compiled program saves",
                    fix="Mark the routine with amanda.staged",
                )
            leaves, results = found
            chosen = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
            for leaf in leaves:
                leaf.grad = None
            # All leaves get theirs, so those that the routine refers to itself, too.
            if chosen:
                roots, seeds = zip(*chosen, strict=True)
                torch.autograd.backward(roots, seeds, retain_graph=True)
            return [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]

        like_graph: Like = ((0,), torch.get_default_dtype(), device)
        recorder = self._add(_Call(record, [*likes, like_graph]))
        deriver = self._add(_Call(derive, [like_of(selection.tensors[i]) for i in wanted]))
        sources = selection.sources
        _, numbers = selection.take()
        return list(
            recorded(
                lambda tensors: _OPS.compute([t.detach() for t in tensors], numbers, recorder),
                lambda tensors: _OPS.compute([t.detach() for t in tensors], [], deriver),
                wanted,
                sources,
            )
        )

    def _take(self, selection: Selection) -> tuple[list[Any], list[Any]]:
        tensors, numbers = selection.take()
        return tensors if self._row is None else [*tensors, self._row], numbers

    def _add(self, call: _Call) -> int:
        number = next(_NUMBERS)
        self.calls.append(call)
        _CALLS[number] = call
        return number

    def runs(self) -> bool:
        """Return True if routines run, which those of a backward pass after `apply` do not."""
        session = self.session
        if session.closed:
            session.warn_once("backward runs after `apply` has ended, so routines do not run")
            return False
        return session.enabled

    def _run(self, step: Step, selection: Selection, given: Any, autodiff: bool = False) -> Any:
        if not self.runs():
            return None
        if self._row is not None:
            tensors, numbers = given
            step = self.rows.get(int(tensors[-1]), {}).get(id(step), step)
            given = tensors[:-1], numbers
        return call_routine(step, selection.whole(*given), autodiff)


class _InRow(Host):
    """The host of one node of a graph that several places share."""

    def __init__(self, host: Host, row: torch.Tensor) -> None:
        self._host, self._row = host, row
        self.calls, self.held, self.rows = host.calls, host.held, host.rows

    @property
    def session(self) -> Session:  # type: ignore[override]
        """The running session of the store, or the last one."""
        return self._host.session


def like_of(tensor: torch.Tensor) -> Like:
    """Return the shape, dtype and device of a result that is like a tensor."""
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _fitting(step: Step, value: Any, like: Like) -> Any:
    if not isinstance(value, torch.Tensor):
        raise RoutineResultError(
            f"A routine returned a {type(value).__name__}, not a tensor",
            where=step.where,
            fix="Return a tensor",
        )
    if like_of(value) != like:
        raise RoutineResultError(
            f"A routine returned a value of shape {tuple(value.shape)} and {value.dtype}, but the "
            f"compiled graph has {like[0]} and {like[1]} there",
            where=step.where,
            fix="Return the same shape and dtype, or mark the routine with amanda.staged",
        )
    return value


def _unsupported(step: Step, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"A routine {what}, of which the compiled graph holds the old value",
        where=step.where,
        fix="Mark the routine with amanda.staged, or set AMANDA_TORCH_COMPILED=eager",
    )


# The operators.


def _observe(tensors: Any, numbers: Any, number: int) -> None:
    _CALLS[number].run(tensors, numbers)


def _edit(tensors: Any, numbers: Any, number: int) -> Any:
    places = [torch.empty_like(tensor, device="meta") for tensor in tensors]
    return _settled(_CALLS[number].run(tensors, numbers), places)


def _compute(tensors: Any, numbers: Any, number: int) -> Any:
    call = _CALLS[number]
    places = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype, _ in call.likes]
    return _settled(call.run(tensors, numbers), places)


def _settled(results: list[torch.Tensor], places: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return results that are laid out like `places`, in memory that nothing else refers to.

    A compiler writes other values there when a result is not used any more.
    """
    counts = _references(results)
    for i, (new, place) in enumerate(zip(results, places, strict=True)):
        if new.layout is not torch.strided:
            results[i] = new.clone()
        elif counts[i] > _ALONE or not _is_settled(new, place):
            made = torch.empty_strided(
                place.shape, place.stride(), dtype=new.dtype, device=new.device
            )
            results[i] = made.copy_(new)
    return results


def _is_settled(new: torch.Tensor, place: torch.Tensor) -> bool:
    if not new.numel():
        return True
    storage = new.untyped_storage()
    return (
        new.stride() == place.stride()
        and users_of_storage(storage) == _USERS
        and storage.resizable()  # Others' memory is not.
        and not (new.data_ptr() % _ALIGNMENT or new.is_conj() or new.is_neg())
    )


def _references(values: list[Any]) -> list[int]:
    """Return the number of references to each value."""
    return [sys.getrefcount(values[i]) for i in range(len(values))]


#: The number of references to a value that only a list refers to.
(_ALONE,) = _references([object()])
#: That to a storage to which one tensor refers: it, and the object that asks.
_USERS = 2
#: In bytes: what Inductor expects of every result.
_ALIGNMENT = 16


def _made(tensors: Any, numbers: Any, number: int) -> Any:
    likes = _CALLS[number].likes
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in likes]


def _define(name: str, returns: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    schema = f"{name}(Tensor[] tensors, SymInt[] numbers, int number) -> {returns}"
    # So marked, they do not run on the values of constants while a graph is traced.
    _LIBRARY.define(schema, tags=torch.Tag.nondeterministic_seeded)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{_NAME}::{name}", fake, lib=_LIBRARY)
    effectful(_LIBRARY, f"{_NAME}::{name}")


_define("observe", "()", _observe, lambda tensors, numbers, number: None)
_define(
    "edit",
    "Tensor[]",
    _edit,
    lambda tensors, numbers, number: [torch.empty_like(tensor) for tensor in tensors],
)
_define("compute", "Tensor[]", _compute, _made)
_OPS = getattr(torch.ops, _NAME)
