"""Hooks that torch calls with gradients, made from functions over sequences of gradients.

The functions (`Taps`) map a sequence of gradients to another. They may also be given the results of
their first routines, if the native interceptor has called these already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from amanda_driver_torch.gradients.gradient_nodes import Result
from amanda_driver_torch.gradients.view_regions import ViewRegion
from amanda_driver_torch.threads.modes import call_hidden, call_with_gradients
from amanda_driver_torch.threads.state import STATE


def tensor_hook(function: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """Return a hook on a tensor, which also accepts results of routines already called."""

    def hook(grad: Any, done: tuple[Any, ...] = ()) -> Any:
        try:
            (new,) = function((grad,), done)
        except Exception as error:
            return unchanged_after(error)
        return None if new is grad else new

    return hook


def view_prehook(
    function: Callable[[Sequence[Any]], Sequence[Any]], region: ViewRegion
) -> Callable[[Sequence[Any]], Any]:
    """Return a prehook of a base's node that edits the gradient of a view."""

    def hook(grads: Sequence[Any]) -> Any:
        if grads[0] is None:
            return None
        try:
            part = region.read(grads[0])
            (new,) = function((part,))
        except Exception as error:
            return unchanged_after(error)
        return None if new is part else (region.write(grads[0], new), *grads[1:])

    return hook


def outputs_prehook(
    function: Callable[..., Sequence[Any]], numbers: Sequence[int]
) -> Callable[..., Any]:
    """Return a prehook of the node that made several outputs, which have the given numbers.

    It also accepts results of routines already called.
    """

    def hook(grads: Sequence[Any], done: tuple[Any, ...] = ()) -> Any:
        given = [grads[number] for number in numbers]
        try:
            new = function(given, done)
        except Exception as error:
            return unchanged_after(error)
        if all(after is before for before, after in zip(given, new, strict=True)):
            return None
        changed = list(grads)
        for number, after in zip(numbers, new, strict=True):
            changed[number] = after
        return tuple(changed)

    return hook


def posthook(
    function: Callable[..., Sequence[Any]],
    places: Sequence[Result],
    regions: Sequence[ViewRegion | None],
) -> Callable[..., Any]:
    """Return a posthook of a node, some of whose results are gradients of an op's inputs.

    The hook takes the results, the gradients before the node, the shapes of the inputs whose
    gradients are reshaped (else None), and the results of routines already called.

    Args:
        function: Maps the gradients of the inputs.
        places: For each input, the result that is its gradient.
        regions: For each input, its region in the result if it is a view that was written.
    """

    def gradients(results: Sequence[Any], shapes: Sequence[torch.Size | None]) -> list[Any]:
        return [
            place.given(results[place.number], shape)
            if region is None or results[place.number] is None
            else region.read(results[place.number])
            for place, shape, region in zip(places, shapes, regions, strict=True)
        ]

    def put(results: list[Any], grads: Sequence[Any], new: Sequence[Any]) -> None:
        for place, region, before, after in zip(places, regions, grads, new, strict=True):
            if after is not before:
                old = results[place.number]
                results[place.number] = (
                    place.back(after, old) if region is None else region.write(old, after)
                )

    def hook(
        results: Sequence[Any],
        _: Sequence[Any],
        shapes: Sequence[torch.Size | None],
        done: tuple[Any, ...] = (),
    ) -> Any:
        try:
            grads = call_hidden(results, gradients, results, shapes)
            new = function(grads, done)
            if all(after is before for before, after in zip(grads, new, strict=True)):
                return None
            changed = list(results)
            call_hidden([*results, *new], put, changed, grads, new)
            return tuple(changed)
        except Exception as error:
            return unchanged_after(error)

    return hook


def in_dtypes(
    function: Callable[..., Sequence[Any]], dtypes: Sequence[torch.dtype]
) -> Callable[..., Sequence[Any]]:
    """Return a function of gradients like another one, which gets them in other data types."""

    def converted(grads: Sequence[Any], done: tuple[Any, ...] = ()) -> Sequence[Any]:
        given = [g if g is None else g.to(d) for g, d in zip(grads, dtypes, strict=True)]
        new = function(given, done)
        return [
            old if after is before else after.to(old.dtype)
            for old, before, after in zip(grads, given, new, strict=True)
        ]

    return converted


def summing_hooks(
    function: Callable[..., Sequence[Any]],
    parts_of: Sequence[Sequence[tuple[Any, int]]],
) -> list[tuple[Any, Callable[..., Any]]]:
    """Return hooks by which an observer sees gradients whose parts come from several nodes.

    Args:
        function: Takes the gradients, once all nodes have run.
        parts_of: For each gradient the nodes that make a part of it, each with the result's number.

    Returns:
        The nodes, each with its hook.
    """
    nodes = list(dict.fromkeys(node for parts in parts_of for node, _ in parts))
    places = [[(nodes.index(node), number) for node, number in p] for p in parts_of]
    count = len(nodes)
    arrived: dict[int, Sequence[Any]] = {}

    def hook_of(index: int) -> Callable[..., Any]:
        def hook(results: Sequence[Any], _: Sequence[Any]) -> None:
            if index in arrived:
                arrived.clear()  # An earlier backward pass did not run all nodes.
            arrived[index] = results
            if len(arrived) < count:
                return
            made = dict(arrived)
            arrived.clear()
            values = [value for given in made.values() for value in given]
            sums = call_hidden(values, call_with_gradients, False, _sums, made, places)
            if any(value is not None for value in sums):
                function(sums)

        return hook

    return [(node, hook_of(index)) for index, node in enumerate(nodes)]


def _sums(
    made: Mapping[int, Sequence[Any]], places: Sequence[Sequence[tuple[int, int]]]
) -> list[torch.Tensor | None]:
    return [_sum(made[index][number] for index, number in place) for place in places]


def _sum(parts: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


def with_shapes(hook: Callable[..., Any], shapes: Sequence[torch.Size]) -> Callable[..., Any]:
    """Bind a `posthook` to the shapes of one execution."""
    return lambda results, grads: hook(results, grads, shapes)


def unchanged_after(error: Exception) -> None:
    """Raise an error of the driver, or report it and leave gradients unchanged."""
    attachment = STATE.attachment
    if attachment is None:
        raise error
    attachment.session.failures.report(error, "pytorch", "gradients of an operator")
