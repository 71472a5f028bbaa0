"""Where the nodes of a graph were called: frames and modules, noted while Dynamo traces.

Owns what is noted, and the scopes and call sites that it means: the same as in eager mode.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from amanda_core.driver_kit import (
    FRAMES,
    FRAMEWORK,
    OUTSIDE,
    STOP,
    USER,
    Activation,
    Code,
    Origin,
    Sites,
    call_offset,
    named_zone,
)
from amanda_driver_torch.identity.frames import is_own, is_torchs
from amanda_driver_torch.identity.zones import ZONES
from amanda_driver_torch.torch_internals.dynamo import (
    CREATE_PROXY,
    CUSTOM_FUNCTION,
    FUNCTION_APPLY,
    LOSS_MADE,
    MODULE_CALL,
    MODULE_NOTE,
    REGION,
    traced_arguments,
)
from amanda_driver_torch.torch_internals.dynamo_guards import guard_identity, name_of
from amanda_driver_torch.torch_internals.modules import wraps

__all__ = [
    "Called",
    "Places",
    "call_recording",
    "called_of",
    "forget_calls",
    "watch_tracing",
    "wrapper_around",
]

R = TypeVar("R")
#: Key of a module's call -> the module and the translator that calls it.
Calls = dict[str, tuple[nn.Module, Any]]

_CALLED = "amanda_called"
_NOTING = "__amanda_noting__"
#: id -> code, since some that Dynamo makes cannot be hashed, and the result of `_offsets`.
_OFFSETS: dict[int, tuple[CodeType, dict[tuple[str, Any], list[int]]]] = {}


class Frame(NamedTuple):
    """A frame that Dynamo traces.

    Attributes:
        code: Its code.
        names: Its globals.
        offset: That of the current instruction.
    """

    code: CodeType
    names: dict[str, Any]
    offset: int


class Called(NamedTuple):
    """Where a node was called.

    Attributes:
        modules: Key of the call -> module, for the modules that Dynamo traces, outermost first.
            In a graph that is kept for other modules, their places instead.
        frames: The frames up to the call of the innermost module, innermost first.
        whole: Whether these are all frames that count.
        source: ``file:line`` of the user's innermost frame, or None.
        function: The `autograd.Function` that is called, and its arguments: nodes and constants, or
            None if one is another object.
    """

    modules: dict[str, nn.Module]
    frames: tuple[Frame, ...]
    whole: bool
    source: str | None
    function: tuple[type, tuple[Any, ...] | None] | None = None


class _Recorder(threading.local):
    #: The calls that are traced; None if nothing is recorded.
    calls: Calls | None = None
    #: Key of a module's call -> the place of the module in the frame.
    places: dict[str, str] = {}  # noqa: RUF012
    #: The module for whose identity there is a guard, at the source that other guards use.
    guarded: nn.Module | None = None
    #: The calls of modules that the program makes, outermost first: their keys, and those of the
    #: modules around them that Dynamo notes.
    made: tuple[tuple[str, tuple[str, ...]], ...] = ()
    #: The `autograd.Function` whose call is traced, and its arguments.
    function: tuple[type, tuple[Any, ...] | None] | None = None


_RECORDER = _Recorder()


def call_recording(function: Callable[..., R], *args: Any) -> R:
    """Call `function`, and note in each node that Dynamo traces there where it was called."""
    before = _RECORDER.calls
    try:
        _RECORDER.calls, _RECORDER.places = {}, {}
        result = function(*args)
        _RECORDER.calls, _RECORDER.guarded = before, None
        return result
    except BaseException:
        _RECORDER.calls, _RECORDER.guarded = before, None
        raise


def watch_tracing(replace: Callable[[Any, str, Any], None]) -> None:
    """Replace the functions of Dynamo that `call_recording` needs."""
    for (owner, name), note in (
        (CREATE_PROXY, _noting),
        (MODULE_CALL, _guarding_module),
        (MODULE_NOTE, _noting_module),
        (LOSS_MADE, _making_loss),
        (REGION, _inlining),
        (FUNCTION_APPLY, _noting_function),
    ):
        original = getattr(owner, name, None)  # Some came with later releases.
        if original is not None and not hasattr(original, _NOTING):
            replacement = note(original)
            setattr(replacement, _NOTING, True)
            replace(owner, name, replacement)


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_proxy(tracer: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        proxy = original(tracer, kind, *args, **kwargs)
        if _RECORDER.calls is not None and kind.startswith("call_"):
            called = _called(tracer.output_graph.current_tx, _RECORDER.calls)
            if proxy.node.target is CUSTOM_FUNCTION:
                called = called._replace(function=_RECORDER.function)
            proxy.node.meta[_CALLED] = called
        return proxy

    return create_proxy


def _is_method_of_module(tx: Any) -> bool:
    names = tx.f_code.co_varnames
    return bool(names) and isinstance(tx.f_locals.get(names[0]), nn.Module)


def _called(tx: Any, calls: Calls) -> Called:
    around = tuple(tx.nn_module_stack)
    # Modules in one that the program makes have paths of their own: Dynamo does not know them as
    # its children.
    made = (key for key, outer in _RECORDER.made if outer == around)
    modules = {key: calls[key][0] for key in (*around, *made) if key in calls}
    caller = calls[next(reversed(modules))][1] if modules else None
    frames, source, whole = [], None, False
    while tx is not None:
        whole = whole or tx is caller
        if not whole:
            frames.append(
                Frame(tx.f_code, tx.f_globals, _offset(tx.f_code, tx.current_instruction))
            )
        if source is None and not (is_torchs(tx.f_globals) or is_own(tx.f_code)):
            source = f"{os.path.basename(tx.f_code.co_filename)}:{tx.lineno}"
        # Beyond a module's `forward` another module's call begins.
        whole = whole or (tx.f_code.co_name == "forward" and _is_method_of_module(tx))
        tx = getattr(tx, "parent", None)
    return Called(modules, tuple(frames), whole, source)


def _offset(code: CodeType, instruction: Any) -> int:
    """Return the offset of an instruction in the code itself, which Dynamo has rewritten."""
    place = getattr(instruction, "positions", None)
    found = _offsets(code).get((instruction.opname, place), ()) if place is not None else ()
    return found[0] if len(found) == 1 else instruction.offset or 0


def _offsets(code: CodeType) -> dict[tuple[str, Any], list[int]]:
    """Return the offsets of code by the name and the place in the source of an instruction."""
    if id(code) not in _OFFSETS:
        table: dict[tuple[str, Any], list[int]] = {}
        for one in dis.get_instructions(code):
            key = one.opname, getattr(one, "positions", None)
            table.setdefault(key, []).append(one.offset)
        _OFFSETS[id(code)] = code, table
    return _OFFSETS[id(code)][1]


def _guarding_module(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_function(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if (calls := _RECORDER.calls) is None:
            return original(variable, tx, *args, **kwargs)
        if variable.source:
            # The path of another module is another one.
            guard_identity(variable.source)
            _RECORDER.guarded = variable.value
            return original(variable, tx, *args, **kwargs)
        trace = functools.partial(original, variable, tx)
        return _in_made(calls, tx.output, variable.value, trace, *args, **kwargs)

    return call_function


def _noting_module(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def record_nn_module_stack(key: str, source: Any, tx: Any, module: nn.Module) -> Iterator[Any]:
        with original(key, source, tx, module) as found:
            if _RECORDER.calls is not None:
                if module is not _RECORDER.guarded:
                    guard_identity(source)
                _RECORDER.guarded = None
                called = next(reversed(tx.nn_module_stack))
                _RECORDER.calls[called] = module, tx
                _RECORDER.places[called] = name_of(source)
            yield found

    return record_nn_module_stack


def _inlining(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_region(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if _RECORDER.calls is None:
            return original(variable, tx, args, kwargs)
        # One graph would stand for all calls of the region, whose operators are others in each.
        return args[0].call_function(tx, list(args[1:]), kwargs)

    return call_region


def _noting_function(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_apply(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        before = _RECORDER.function
        try:
            if _RECORDER.calls is not None:
                given = None if kwargs else traced_arguments(args)
                _RECORDER.function = variable.fn_cls, given
            return original(variable, tx, args, kwargs)
        finally:
            _RECORDER.function = before

    return call_apply


def _making_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(variable, tx, *args, **kwargs)
        if (calls := _RECORDER.calls) is not None:
            made.fn = functools.partial(_in_made, calls, tx.output, variable.value(), made.fn)
        return made

    return make


def _in_made(
    calls: Calls, output: Any, module: nn.Module, trace: Callable[..., R], *args: Any, **kwargs: Any
) -> R:
    """Trace the call of a module that the program has made, of which Dynamo notes nothing."""
    key, tx, before = f"made {len(calls)}", output.current_tx, _RECORDER.made
    calls[key] = module, tx
    _RECORDER.made = (*before, (key, tuple(tx.nn_module_stack)))
    try:
        return trace(*args, **kwargs)
    finally:
        _RECORDER.made = before


class Places:
    """The places of the nodes of one graph, as origins of operators.

    Args:
        sites: Classifies frames.
        activations: The calls of modules around the graph, outermost first.
        enter: Returns the scope of a module called in an activation.
        outer: The frames around the graph, innermost first.
        source: ``file:line`` of the user's innermost frame among these, or None.

    Attributes:
        source: The same.
    """

    def __init__(
        self,
        sites: Sites[Any],
        activations: list[Activation],
        enter: Callable[[nn.Module, Activation | None], Any],
        outer: list[tuple[Code, int]],
        source: str | None,
    ) -> None:
        self._sites, self._enter, self._outer, self.source = sites, enter, outer, source
        around = activations[-1] if activations else None
        #: Keys of calls -> the activation of the innermost.
        self._activations: dict[tuple[str, ...], Activation] = {
            (): Activation(around.scope if around is not None else OUTSIDE)
        }

    def activation(self, called: Called) -> Activation:
        """Return the activation in which a node runs."""
        keys: tuple[str, ...] = ()
        for key, module in called.modules.items():
            outer, keys = self._activations[keys], (*keys, key)
            if wraps(module):
                self._activations[keys] = outer
            elif keys not in self._activations:
                parent = outer if outer.scope.root or outer.scope.zone else None
                self._activations[keys] = Activation(self._enter(module, parent))
        return self._activations[keys]

    def origin(self, op_type: str, called: Called, wrapper: Any) -> tuple[Origin, Activation]:
        """Return where an operator is called, and in which activation.

        Args:
            op_type: Its type.
            called: Where its node was called.
            wrapper: The Python function of torch that runs it, or None.
        """
        activation = self.activation(called)
        limit = FRAMES if activation.scope.root else 1
        found: list[tuple[Code, int]] = []
        if wrapper is not None:
            code = self._sites.classify(wrapper[0], wrapper[1])
            found.append((code, call_offset(code.opcodes, wrapper[2])))
        stopped = called.whole
        for frame in called.frames:
            code = self._sites.classify(frame.code, frame.names)
            if code.kind == STOP:
                stopped = True
                break
            if code.kind == USER or (code.kind == FRAMEWORK and not found):
                offset = frame.offset
                known = offset < len(code.opcodes)
                found.append((code, call_offset(code.opcodes, offset) if known else offset >> 1))
                if code.kind == USER:
                    limit -= 1
                    if not limit:
                        break
        if limit and not stopped:
            found += self._outer[:limit]
        return Origin(op_type, activation.scope, found, _zone_of(called)), activation


def _zone_of(called: Called) -> str:
    """Return the zone that the frames of a node decide, or an empty string."""
    for frame in called.frames:
        if zone := named_zone(ZONES, str(frame.names.get("__name__", "")), frame.code.co_name):
            return zone
    return ""


def called_of(node: torch.fx.Node) -> Called:
    """Return where a node was called; nowhere if Dynamo made it itself."""
    found: Called = node.meta.get(_CALLED, Called({}, (), True, None))
    return found


def without_modules(graph: torch.fx.Graph) -> bool:
    """Name the modules in which the nodes of a graph were called by their places.

    Returns:
        Whether all have one: the program may have made some itself.
    """
    for node in graph.nodes:
        if (called := node.meta.get(_CALLED)) is not None:
            if not called.modules.keys() <= _RECORDER.places.keys():
                return False
            places = {key: _RECORDER.places[key] for key in called.modules}
            node.meta[_CALLED] = called._replace(modules=places)
    return True


def places_of(node: torch.fx.Node, read: Callable[[str], nn.Module]) -> None:
    """Put modules in the place of their names, which `without_modules` has noted."""
    if (called := node.meta.get(_CALLED)) is not None:
        modules = {key: read(place) for key, place in called.modules.items()}
        node.meta[_CALLED] = called._replace(modules=modules)


def forget_calls(gm: torch.fx.GraphModule) -> None:
    """Forget where the nodes of a graph and of those in it were called, which outlive modules."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop(_CALLED, None)


def wrapper_around(frame: FrameType | None, end: CodeType) -> Any:
    """Return the innermost frame of torch around a frame: code, globals, position; None if another
    comes first.

    Args:
        frame: The frame; those of the driver are passed over.
        end: Code at which the search ends.
    """
    while frame is not None and frame.f_code is not end:
        if not is_own(frame.f_code):
            names = frame.f_globals
            return (frame.f_code, names, frame.f_lasti) if is_torchs(names) else None
        frame = frame.f_back
    return None
