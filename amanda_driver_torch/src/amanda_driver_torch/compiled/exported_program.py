"""A model with woven edits as a `torch.export.ExportedProgram`.

Dynamo captures one graph of the whole model, into which `weave` writes the staged routines; a
module that runs this graph with the model's own parameters is then exported. Owns where the values
of the graph come from: arguments, parameters, buffers, and where those of the result go.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from amanda_driver_torch.compiled.callbacks import CompiledCode
from amanda_driver_torch.compiled.refusals import not_exported
from amanda_driver_torch.operators.module_values import INPUT, OUTPUT, replace_first
from amanda_driver_torch.threads.state import call_quietly
from amanda_driver_torch.torch_internals.dynamo import (
    NotTraced,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

__all__ = ["exported_program"]

# Dynamo calls them in its graph, and does not look into them.
for _marker in (INPUT, OUTPUT):
    torch.compiler.allow_in_graph(_marker.func)  # type: ignore[no-untyped-call]

#: Calls a model. Its code is not of the driver's files, whose frames Dynamo leaves alone.
_CALL = eval(compile("lambda model, args, kwargs: model(*args, **kwargs)", "<exported>", "eval"))


def exported_program(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], code: CompiledCode
) -> torch.export.ExportedProgram:
    """Export a model with the edits of the applied tools.

    Args:
        model: A module or a function.
        args: Example inputs.
        kwargs: Others that are given by name.
        code: Weaves the applied tools.

    Raises:
        UnsupportedError: A tool edits on the host, or the model has no single graph.
    """
    capture = _Capture()
    with torch.no_grad(), code.tools.exporting():
        if why := code.tools.why_not(model):
            raise not_exported(why)
        if code.session.watches_values and not isinstance(model, nn.Module):
            raise not_exported("a tool chooses modules, and it is a function that calls them")
        compiled: Any = torch.compile(_CALL, backend=capture, fullgraph=True, dynamic=False)
        try:
            with _marking(model, code.session.calls.shows):
                returned = compiled(model, tuple(args), dict(kwargs))
        except NotTraced as error:
            raise not_exported(str(error).partition("\n")[0]) from error
        if capture.graph is None:
            raise not_exported("it runs no operators")
        given = tuple(args), dict(kwargs)
        module = call_quietly(_Program, model, capture, given, returned)
        found: torch.export.ExportedProgram = call_quietly(
            torch.export.export, module, *given, strict=False
        )
        call_quietly(_make_whole, found.constants)
    return found


def _make_whole(constants: dict[str, Any]) -> None:
    """Replace constants that torch's files cannot hold alone by copies with memory of their own."""
    for name, value in constants.items():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            is_whole = value.untyped_storage().nbytes() == value.numel() * value.itemsize
            if not (is_whole and value.is_contiguous()):
                constants[name] = value.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def _marking(model: Any, shows: Callable[[str, str], bool]) -> Iterator[None]:
    """Let the graph of a model have operators for the values of modules that tools are shown.

    Args:
        model: The model.
        shows: Whether a tool is shown an operator of such a type for the module at a path.
    """

    def mark_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return replace_first((args, kwargs), INPUT.func)

    def mark_output(module: nn.Module, args: Any, output: Any) -> Any:
        return replace_first(output, OUTPUT.func)

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
            if shows(INPUT.op_type, path):
                hook = module.register_forward_pre_hook(mark_input, with_kwargs=True)
                stack.callback(hook.remove)
            if shows(OUTPUT.op_type, path):
                stack.callback(module.register_forward_hook(mark_output).remove)
        yield


class _Capture:
    """A backend that keeps the graph, the values that it gets, and stand-ins for its results."""

    def __init__(self) -> None:
        self.graph: fx.GraphModule | None = None
        self.given: Sequence[Any] = ()
        self.results: list[Any] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graph = gm
        (output,) = (node for node in gm.graph.nodes if node.op == "output")

        def run(*given: Any) -> list[Any]:
            # The model does not run: it may write its buffers.
            self.given = given
            self.results = [_like(node.meta["example_value"]) for node in output.args[0]]
            return self.results

        return run


def _like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise not_exported(f"it returns a {type(value).__name__} that depends on values")
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device)


class _Place(NamedTuple):
    """Where a value is: among the results, the arguments or the parameters, or the value itself."""

    among: str
    at: Any


class _Program(nn.Module):
    """A captured graph as a module with the parameters, the names and the arguments of a model."""

    def __init__(self, model: Any, capture: _Capture, given: Any, returned: Any) -> None:
        super().__init__()
        if isinstance(model, nn.Module):
            kept = model.state_dict(keep_vars=True)
            for name, child in model.named_children():
                self.add_module(name, child)
            for name, parameter in model.named_parameters(recurse=False, remove_duplicate=False):
                self.register_parameter(name, parameter)
            for name, buffer in model.named_buffers(recurse=False, remove_duplicate=False):
                self.register_buffer(name, buffer, persistent=name in kept)
            self.training = model.training
        places: dict[int, _Place] = {}
        named = (*self.named_parameters(remove_duplicate=False), *self.named_buffers())
        for path, tensor in named:
            places.setdefault(id(tensor), _Place("parameters", path.split(".")))
        for index, value in enumerate(tree_leaves(given)):
            if isinstance(value, torch.Tensor):
                places.setdefault(id(value), _Place("arguments", index))
        self._taken = [places.get(id(one), _Place("values", one)) for one in capture.given]
        places |= {id(one): _Place("results", i) for i, one in enumerate(capture.results)}
        leaves, self._form = tree_flatten(returned)
        self._left = [places.get(id(one), _Place("values", one)) for one in leaves]
        # Not a submodule: it would be one of the model's.
        self._graph = [capture.graph]

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        # Inputs of the program are named as those of the model.
        function = model.forward if isinstance(model, nn.Module) else model
        forward.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        self.forward = forward

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        arguments = tree_leaves((args, kwargs))
        graph = self._graph[0]
        assert graph is not None
        results = graph(*[self._value(place, arguments, ()) for place in self._taken])
        left = [self._value(place, arguments, results) for place in self._left]
        return tree_unflatten(left, self._form)

    def _value(self, place: _Place, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        if place.among == "parameters":
            found: Any = self
            for name in place.at:
                found = getattr(found, name)
            return found
        if place.among == "values":
            return place.at
        return (arguments if place.among == "arguments" else results)[place.at]
