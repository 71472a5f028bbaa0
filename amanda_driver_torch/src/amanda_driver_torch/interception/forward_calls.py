"""Modules whose `forward` is called, and not the module itself.

Owns the search for them in the running frames, and their `forward`, which is replaced from then on:
it enters the module as a call does. Programs without such calls have nothing replaced.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from amanda_core.driver_kit import Known, Session, local_of
from amanda_driver_torch.identity.frames import BOUNDARY, FORWARDS, is_own
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.modules import MODULE_CALLS, modules_in

__all__ = ["ForwardCalls", "running_forwards"]

_FORWARD = "forward"
#: Packages whose frames may lie between the program and this driver when tools are applied.
_BETWEEN = frozenset({"amanda", "amanda_core", "contextlib", "pluggy"})
#: Instruction that loads a method to call it -> the bit of its argument that says so.
_LOADS_METHOD = {"LOAD_METHOD": 0} if sys.version_info < (3, 12) else {"LOAD_ATTR": 1}


def running_forwards(around_call: bool = False) -> list[tuple[nn.Module, CodeType]]:
    """Return the modules whose `forward` runs without a call of them, innermost first.

    Args:
        around_call: Whether to look around the call of a module that begins now, and not inside.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_own(frame.f_code):
        if id(frame.f_code) in BOUNDARY and not around_call:
            return []
        frame = frame.f_back
    found: list[tuple[nn.Module, CodeType]] = []
    while frame is not None and id(frame.f_code) not in BOUNDARY:
        if _calls_modules(frame):
            # `forward` may be decorated, so the module is read here.
            called = local_of(frame, frame.f_code.co_varnames[0]) if found else None
            return [one for one in found if one[0] is not called]
        module = _module_of(frame)
        if module is not None:
            found.append((module, frame.f_code))
        frame = frame.f_back
    return found


#: Code -> whether it is the `forward` of a class, by id: any function can be assigned as one.
_FORWARDS: dict[int, tuple[CodeType, bool]] = {}
_CODES = 16384


def _module_of(frame: FrameType) -> nn.Module | None:
    """Return the module whose `forward` a frame runs, or None."""
    code = frame.f_code
    known = _FORWARDS.get(id(code))
    # Before Python 3.13 reading would write into the dictionary that `locals()` returned.
    if not (known[1] if known is not None else code.co_argcount and "locals" not in code.co_names):
        return None
    owner = local_of(frame, code.co_varnames[0])
    is_module = issubclass(type(owner), nn.Module)
    if known is None:
        kinds: tuple[type, ...] = type(owner).__mro__ if is_module else ()
        known = code, any(_code_of(vars(kind).get(_FORWARD)) is code for kind in kinds)
        if len(_FORWARDS) > _CODES:
            _FORWARDS.clear()
        _FORWARDS[id(code)] = known
    return owner if is_module and known[1] else None


def _code_of(function: Any) -> CodeType | None:
    while type(function) is FunctionType:
        if "__wrapped__" not in vars(function):
            return function.__code__
        function = vars(function)["__wrapped__"]
    return None


def _calls_modules(frame: FrameType) -> bool:
    module, name = MODULE_CALLS
    return frame.f_code.co_name == name and frame.f_globals.get("__name__") == module


class ForwardCalls:
    """The classes of which a module's `forward` is called directly.

    Args:
        session: The session.
        replace: Replaces an attribute while any session is attached.
    """

    def __init__(self, session: Session, replace: Callable[[Any, str, Any], None]) -> None:
        self._session, self._replace = session, replace
        self._looked_at: Known[bool] = Known()

    def begun(self, running: Sequence[tuple[nn.Module, CodeType]]) -> None:
        """Watch modules whose `forward` had begun before it was known that it is called."""
        self._watch(type(module) for module, _ in running)
        if self._session.watches_scopes:
            self._session.warn_once(
                f"The forward of {type(running[-1][0]).__name__} was called, and not the module, "
                "and had begun before this was seen. Tools see this call's operators, but not "
                "that modules begin and end, nor what these take and return; from the next "
                "call on they do."
            )

    def foresee_program(self) -> None:
        """Watch all classes if the program that applies tools calls a `forward`."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (is_own(frame.f_code) or _package(frame) in _BETWEEN):
            frame = frame.f_back
        if frame is None:
            return
        functions = [one for one in list(frame.f_globals.values()) if type(one) is FunctionType]
        codes = [frame.f_code, *filter(None, map(_code_of, functions))]
        if any(map(_calls_in, codes)):
            self._watch(_written(nn.Module))

    def foresee(self, root: nn.Module) -> None:
        """Watch the modules of a model if one of its methods calls the `forward` of another.

        Otherwise the first call of each would be known by frames only, and not as a call.
        """
        kinds = {type(module) for _, module in modules_in(root)}
        if all(map(self._looked_at.get, kinds)):
            return
        for kind in kinds:
            self._looked_at.set(kind, True)
        if any(map(_calls_forward, kinds)):
            self._watch(kinds)

    def _watch(self, kinds: Iterable[type]) -> None:
        for kind in kinds:
            owner = next((one for one in kind.__mro__ if _FORWARD in vars(one)), None)
            function = vars(owner)[_FORWARD] if owner is not None else None
            if type(function) is FunctionType and not hasattr(function, _MARK):
                self._replace(owner, _FORWARD, _entering(function))


def _calls_forward(kind: type) -> bool:
    """Return True if a method of a class calls a `forward`, other than that of its base."""
    own = [one for one in kind.__mro__ if one.__module__.partition(".")[0] != "torch"]
    codes = [_code_of(value) for one in own for value in vars(one).values()]
    return any(code is not None and _calls_in(code) for code in codes)


#: Code -> whether it calls a `forward`, by id: to hash code means to hash its constants.
_CALLING: dict[int, tuple[CodeType, bool]] = {}


def _calls_in(code: CodeType) -> bool:
    """Return True if code, or that of a function in it, calls a `forward`.

    Programs that apply tools in each iteration ask each time.
    """
    known = _CALLING.get(id(code))
    if known is None:
        inside = (_calls_in(inner) for inner in code.co_consts if type(inner) is CodeType)
        calls = (_FORWARD in code.co_names and _loads(code)) or any(inside)
        if len(_CALLING) > _CODES:
            _CALLING.clear()
        known = _CALLING[id(code)] = code, calls
    return known[1]


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _written(base: type) -> Iterator[type]:
    """Yield the classes that derive from a class and are not torch's."""
    derived: list[type] = base.__subclasses__()
    for kind in derived:
        if kind.__module__.partition(".")[0] != "torch":
            yield kind
        yield from _written(kind)


def _loads(code: CodeType) -> bool:
    bases = calls = 0
    for instruction in dis.get_instructions(code):
        if instruction.argval == "super":
            bases += 1
        elif instruction.argval == _FORWARD:
            # Loading it without calling it does not count, such as to assign it.
            bit = _LOADS_METHOD.get(instruction.opname)
            calls += bit is not None and (instruction.arg or 0) & bit == bit
    return calls > bases


_MARK = "__amanda_forward__"


def _entering(original: FunctionType) -> Callable[..., Any]:
    run = _run

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(original, args, kwargs)

    # Scripting looks up the names in its source among the globals.
    code = forward.__code__.replace()  # Dynamo keeps what it compiles by the code object.
    FORWARDS[id(code)] = code
    replacement = FunctionType(
        code, original.__globals__, original.__name__, None, forward.__closure__
    )
    setattr(functools.update_wrapper(replacement, original), _MARK, True)
    return replacement


def _run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # First, so that Dynamo evaluates it while tracing and only traces the original.
    if torch.compiler.is_compiling():
        return original(*args, **kwargs)
    attachment = STATE.attachment
    caller = sys._getframe(2)
    if (
        attachment is None
        or STATE.quiet
        or not args
        or not attachment.session.enabled
        or _calls_modules(caller)
    ):
        return original(*args, **kwargs)
    return attachment.call_forward(args[0], original, args[1:], kwargs)
