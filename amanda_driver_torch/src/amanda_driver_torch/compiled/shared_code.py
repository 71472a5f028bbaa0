"""Code that is compiled once for modules alike, such as the layers of a model.

Without tools, layers that are compiled one by one share the code of the first. Under tools the
operators of each are others: analysis runs for each layer, on the graph that Dynamo has traced for
the first. If the plans differ only in their routines on the host and in the tensors to which staged
routines refer, the layer gets a row, whose number and tensors are inputs of the graph, and runs the
same code. Owns the rows, and which objects each serves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx

from amanda_core.driver_kit import Plan, Step
from amanda_driver_torch.compiled.call_sites import places_of, without_modules
from amanda_driver_torch.compiled.host import Row, Steps
from amanda_driver_torch.compiled.operators import Woven
from amanda_driver_torch.compiled.traced_graph import SYMBOLIC, example, is_static
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.dynamo import HigherOrderOperator, tree_leaves
from amanda_driver_torch.torch_internals.dynamo_guards import ServedFrame
from amanda_driver_torch.torch_internals.internals import has_storage, storage_address

__all__ = ["SharedCode", "copied", "is_region", "scope_number"]


class SharedCode:
    """A piece of compiled code, and the places that it serves.

    A place is one set of the modules and tensors that a frame reads, such as a layer and its
    weights. Serving it means that Dynamo runs this code for frames with just these objects.
    Compiled code itself, which may outlive the tools, refers to none of their objects.

    Args:
        frame: The frame for which it is compiled.
        graph: A copy of its graph as Dynamo has traced it.
        epoch: The epoch of the tools. The code serves no other.
        steps: Number of a row -> id of a step of the first place -> the step in that row. This
            class fills it.

    Attributes:
        serves: Returns True for the local variables of a frame that the code serves, and chooses
            its row.
        first: The row of the first place.
        result: What Dynamo made of the frame, once it is compiled.
    """

    def __init__(
        self, frame: ServedFrame, graph: fx.GraphModule, epoch: int, steps: dict[int, Steps]
    ) -> None:
        self._frame, self._graph, self._steps = frame, graph, steps
        self._types = list(map(type, frame.objects()))
        self._rows: dict[tuple[int, ...], Row] = {}
        #: The row that guards have chosen last. One thread runs the code.
        self._chosen = chosen = [Row()]
        #: Returns the number of the place for which the code runs.
        self.place: Callable[[], int] = lambda: chosen[0].index
        self.serves = frame.serves(self._rows, epoch, self._chosen)
        self._woven: Sequence[Woven] = ()
        self.result: Any = None
        self.first = self.add(frame.objects())

    def begin(self, woven: Sequence[Woven]) -> bool:
        """Note the nodes with plans of the first place; return False if others cannot share them.

        Args:
            woven: The nodes, in the order of the graph.
        """
        self._woven = woven
        return all(map(_may_differ, _steps(woven))) and self._give(self.first, woven)

    def end(self, code: CodeType, result: Any) -> None:
        """Note what Dynamo made of the frame's code: other places may share it from now on.

        Args:
            code: The code of the frame.
            result: What Dynamo returned for the frame.
        """
        self._code, self.result = code, result  # It is found by the id of the code.
        self._frame.hold()

    def in_row(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return compiled code that gets `Row.given` of the row that runs as its last arguments."""
        chosen = self._chosen
        return lambda *args: compiled(*args, *chosen[0].given)

    def add(self, objects: Sequence[Any]) -> Row:
        """Serve another place from now on, until one of its objects dies or the row is removed.

        Args:
            objects: The modules and tensors of the place, in the order of `ServedFrame.objects`.
                The code serves frames with these very objects, in the current scope. They are held
                weakly.

        Returns:
            The new row of the place. It has a number, and no tensors of staged routines yet.
        """
        key, rows = self._key(objects), self._rows
        rows[key] = row = Row()
        row.held = [weakref.ref(one, lambda _: rows.pop(key, None)) for one in objects]
        return row

    def adopt(self, frame: Any, analyse: Callable[[fx.GraphModule], Sequence[Woven]]) -> Any | None:
        """Serve a frame as well if its plans are alike; return what Dynamo needs for its call.

        Args:
            frame: The frame about which Dynamo asks, of the code that was compiled.
            analyse: Analyses a copy of the graph for the frame, and returns its nodes with plans.

        Returns:
            The result for Dynamo; None if the code cannot serve the frame.
        """
        if self.result is None:
            return None
        try:
            objects = self._frame.objects(frame.f_locals)
        except Exception:
            return None
        key = self._key(objects)
        if key in self._rows or list(map(type, objects)) != self._types:
            return None
        row, is_alike = self.add(objects), False
        try:
            if self._frame.is_accepted(self.result, frame):
                is_alike = self._are_alike(analyse(self._copy(frame)), row)
        finally:
            if not is_alike:
                self._rows.pop(key, None)
        return self._frame.result_for(self.result) if is_alike else None

    def _copy(self, frame: Any) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.graph_copy(self._graph.graph, {}))
        copy = fx.GraphModule(self._graph, graph)
        self._frame.place(copy, frame, places_of)
        return copy

    def _are_alike(self, woven: Sequence[Woven], row: Row) -> bool:
        if [_form(one) for one in woven] != [_form(one) for one in self._woven]:
            return False
        firsts, others = list(_steps(self._woven)), list(_steps(woven))
        if not (all(map(_may_differ, others)) and self._give(row, woven)):
            return False
        if _inputs(row, woven) != _inputs(self.first, self._woven):
            return False
        self._steps[row.index] = {id(a): b for a, b in zip(firsts, others, strict=True)}
        return True

    def _give(self, row: Row, woven: Sequence[Woven]) -> bool:
        """Give a row the tensors of its staged routines; return False if they may not be inputs."""
        tensors = list({id(tensor): tensor for one in woven for tensor in one.lifted}.values())
        if any(tensor.requires_grad or not has_storage(tensor) for tensor in tensors):
            return False
        row.given = (*row.given, *tensors)
        weights = [one for held in row.held if isinstance(one := held(), torch.Tensor)]
        inputs = [*tensors, *filter(has_storage, weights)]
        # A compiler knows nothing of inputs that share memory in other places.
        return len({storage_address(one.untyped_storage()) for one in inputs}) == len(inputs)

    def _key(self, objects: Sequence[Any]) -> tuple[int, ...]:
        return (scope_number(), *map(id, objects))


def scope_number() -> int:
    """Return the number of the scope in which the program is."""
    return STATE.activations[-1].scope.number if STATE.activations else 0


def is_region(frame: Any) -> bool:
    """Return True if a frame is of a module that another one calls."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    module = frame.f_locals.get(names[0]) if names else None
    if not isinstance(module, torch.nn.Module):
        return False
    return len(STATE.activations) > 1


def copied(gm: fx.GraphModule) -> fx.GraphModule | None:
    """Return a copy of a graph for later analysis; None if it cannot serve there.

    The sizes of its values must be known, and it has no graphs inside.
    """
    for node in gm.graph.nodes:
        if isinstance(node.target, HigherOrderOperator) or node.op == "call_module":
            return None
        value = example(node)
        if not is_static(value) or any(isinstance(one, SYMBOLIC) for one in tree_leaves(value)):
            return None
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph) if without_modules(graph) else None


def _plans(woven: Sequence[Woven]) -> Iterator[Plan]:
    for one in woven:
        for plan in one.plans:
            if plan is not None:
                yield from plan.plans


def _inputs(row: Row, woven: Sequence[Woven]) -> Any:
    """Return what the tensors of a row are like, and which nodes of a graph use each."""
    numbers = {id(tensor): number for number, tensor in enumerate(row.given)}
    return [[numbers[id(tensor)] for tensor in one.lifted] for one in woven], [
        (type(one), one.shape, one.stride(), one.dtype, one.device, one.is_conj(), one.is_neg())
        for one in row.given
    ]


def _steps(woven: Sequence[Woven]) -> Iterator[Step]:
    for plan in _plans(woven):
        yield from plan.steps
        if plan.replacement is not None:
            yield plan.replacement


def _may_differ(step: Step) -> bool:
    """Return True for what is staged, whose trace is compared, and for most that is on the host."""
    action = step.action
    return action.staged or not (action.autodiff or action.kind.is_replacement)


def _form(woven: Woven) -> Any:
    """Return what two places have in common if their plans are alike."""
    plans = [
        plan
        and (
            [list(map(_form_of_step, one.steps)) for one in plan.plans],
            plan.outputs,
            plan.backward
            and sorted((str(k), sorted(map(str, v))) for k, v in plan.backward.plans.items()),
        )
        for plan in woven.plans
    ]
    return woven.place, woven.target, woven.names, plans, woven.trace.form


def _form_of_step(step: Step) -> Any:
    action = step.action
    return action.kind, action.positions, action.observe, action.staged, action.autodiff
