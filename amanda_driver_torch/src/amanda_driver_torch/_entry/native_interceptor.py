"""The native interceptor: torch's own bindings, redirected while a session is attached.

Owns the description of operators for the extension (which bindings are operators, and how each is
called), and operators that are not bindings. `native/` handles the calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import nn

from amanda_core import CoverageGap, Session, Step
from amanda_core.errors import annotate
from amanda_core.scopes import Activation, Scope
from amanda_core.sites import Code, Sites
from amanda_core.threads import THREAD
from amanda_core.weak import WeakValue, weakly
from amanda_core.weights.state import Memoized
from amanda_driver_torch._autograd.driver_nodes import tap
from amanda_driver_torch._autograd.records import OpRecord
from amanda_driver_torch._entry.coverage_limits import LIMITS
from amanda_driver_torch._entry.interceptor import Handler
from amanda_driver_torch._entry.patches import PATCHES
from amanda_driver_torch._entry.tracing import FAKE_TENSOR_CHECKS
from amanda_driver_torch._execution.execute import Execution
from amanda_driver_torch._identity.rules import may_decide_zone
from amanda_driver_torch._operators.bindings import is_operator, operators, type_name
from amanda_driver_torch._operators.operator import Operator
from amanda_driver_torch._thread.modes import (
    hidden_from_modes,
    in_users_modes,
    is_observed,
    suspended_modes,
)
from amanda_driver_torch._thread.state import STATE, quietly
from amanda_driver_torch._torch.extension import hastened, native
from amanda_driver_torch._torch.internals import (
    FUNCTIONS,
    TENSOR_METHODS,
    FunctionBase,
    OpOverload,
    OpOverloadPacket,
    function_mode_count,
    next_sequence,
    some_binding,
)
from amanda_driver_torch._torch.tensor_attributes import is_weight

__all__ = ["NativeInterceptor"]

R = TypeVar("R")


class NativeInterceptor:
    """Sees every call of a torch binding in the thread that starts it."""

    name = "native"
    #: It runs outside of the code that turns a TypeError into NotImplemented.
    hides_type_errors = False

    def __init__(self, attachment: Handler, execution: Execution, sites: Sites[OpRecord]) -> None:
        self._refused = _define()
        self.watch = native.Watch(
            session=attachment.session,
            get_control=_control,
            execute=_ways(attachment.execute_known, _hide_except_original),
            settle=_ways(execution.settle, _hide_from_modes),
            call_module=attachment.call_module,
            enter_module=attachment.trace_module,
            module_failed=attachment.module_failed,
            scopes=attachment.scopes,
            resume=_ways(execution.resume, _hide_except_original),
            edit=execution.edit,
            failed=attachment.report_failure,
            raise_pending=attachment.session.raise_pending,
            pending=attachment.session.pending,
            annotate=functools.partial(_annotate, attachment.session),
            tap=tap,
            weakly=weakly,
            weak_value=WeakValue,
            memoized=Memoized,
            resolve=_ways(attachment.resolve, _hide_from_modes),
            region=_ways(sites.regions.token, _hide_from_modes),
            is_weight=_hide_from_modes(is_weight),
            classify=functools.partial(_classify, sites),
            look_up=sites.labels.look_up,
            record_type=OpRecord,
            parameter_type=nn.Parameter,
            tensor_type=torch.Tensor,
        )
        self.locate = self.watch.locate
        self.forget = self.watch.forget

    def start(self) -> None:
        """Start intercepting in this thread."""
        _learn_graphs()
        for kind in (OpOverload, OpOverloadPacket):
            if not hasattr(kind.__call__, _MARK):
                PATCHES.add(kind, "__call__", _dispatcher_call(kind.__call__))
        for name in self._refused:
            owner, _, attribute = name.rpartition(".")
            if owner == FUNCTIONS or hasattr(torch, attribute):
                PATCHES.add_operator(torch, attribute, attribute)
        native.install()

    def stop(self) -> None:
        """Stop intercepting; with the last session, restore the bindings."""
        native.uninstall()
        self.watch.close()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Intercept operators during this context, although an operator around it is running."""
        depth, STATE.depth = STATE.depth, 0
        try:
            yield
        finally:
            STATE.depth = depth

    def activation(self, scope: Scope) -> Activation:
        """Return the extension's activation for a call of a module."""
        activation: Activation = native.Activation(scope)
        return activation

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what the redirected tables do not show."""
        return [
            *LIMITS[self.name],
            *(CoverageGap(f"early references to {n}", why) for n, why in self._refused.items()),
        ]


def _ways(
    function: Callable[..., R], hide: Callable[[Callable[..., R]], Callable[..., R]]
) -> tuple[Callable[..., R], Callable[..., R]]:
    """Return a function to call without function modes, and the one to call with them."""
    return function, hide(function)


def _hide_except_original(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that user's function modes see only the original, its third argument."""

    def run(record: Any, operator: Any, call: Callable[..., Any], *rest: Any) -> Any:
        with suspended_modes():
            return function(record, operator, in_users_modes(call), *rest)

    return run


def _hide_from_modes(function: Callable[..., R]) -> Callable[..., R]:
    """Wrap `function` so that the user's function modes do not see it."""

    def run(*arguments: Any) -> R:
        with suspended_modes():
            return function(*arguments)

    return run


def _classify(sites: Sites[OpRecord], code: CodeType, namespace: Mapping[str, Any]) -> Code:
    known = sites.classify(code, namespace)
    known.zoned = may_decide_zone(code, namespace)
    return known


def _annotate(session: Session, step: Step, error: BaseException) -> None:
    annotate(error, f"In {step.where}")
    caller = sys._getframe().f_back
    around = "" if caller is None else caller.f_globals.get("__name__")
    if isinstance(error, TypeError) and around == TENSOR_METHODS:
        session.defer(error)  # A reflected operator in Python turns it into NotImplemented.


def _control() -> Any:
    return THREAD.control


@functools.cache
def _define() -> dict[str, str]:
    """Describe all operators to the extension; return name -> why it is not redirected."""
    folder = str(Path(torch.__file__).parent)
    refused = {}
    _set_up(some_binding)
    for name, binding in operators().items():
        call = binding
        if name.endswith("__"):
            call = binding.__get__ if hasattr(binding, "__set__") else _answering(binding)
        elif hasattr(binding, "__set__"):
            call = _reading(binding)
        why = native.define(binding, name, type_name(binding), call, folder)
        if why is not None:
            refused[name] = why
    return refused


def _set_up(binding: Any) -> None:
    """Tell the extension where torch's library is, by one of its bindings; None to call Python
    instead.
    """
    native.set_up(
        _operator,
        binding,
        torch.is_grad_enabled,
        next_sequence,
        function_mode_count,
        is_observed,
        FAKE_TENSOR_CHECKS,
    )


def _learn_graphs() -> None:
    """Let the extension find out how torch keeps graphs, unless it knows."""
    if native.knows_graphs():
        return
    with (
        quietly(),
        suspended_modes(),
        hidden_from_modes(()),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        leaf, other = (torch.ones(1, device="cpu", requires_grad=True) for _ in range(2))
        one, two = leaf.exp(), other.exp()
        native.learn_graphs(nn.Parameter, FunctionBase, leaf, one, two, one * two)


def _operator(binding: Any, op_type: str) -> Operator:
    return Operator(binding, binding, op_type)


def _reading(attribute: Any) -> Callable[..., Any]:
    read = attribute.__get__

    def call(tensor: Any) -> Any:
        return read(tensor)

    return call


def _answering(binding: Any) -> Callable[..., Any]:
    """Return a call of a Python operator that raises instead of returning NotImplemented."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = binding(*args, **kwargs)
        if result is NotImplemented:
            STATE.refused = True
            raise TypeError("unsupported operands")
        return result

    return call


# Operators of the dispatcher, which Python calls through `torch.ops` objects.

_MARK = "__amanda_dispatcher__"


def _dispatcher_call(original: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Operator | None] = {}

    def hand_over(attachment: Any, operator: Any, run: Any, args: Any, kwargs: Any) -> Any:
        return attachment.execute(operator, run, args, kwargs)

    hidden = _hide_except_original(hand_over)

    @functools.wraps(original)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        attachment = STATE.attachment
        if (
            attachment is None
            or attachment.watch is None
            or STATE.depth
            or not attachment.watching()
        ):
            return original(self, *args, **kwargs)
        if self not in known:
            try:
                known[self] = Operator(self, self, type_name(self)) if is_operator(self) else None
            except Exception as error:
                attachment.report_failure(error, str(self))
                return original(self, *args, **kwargs)
        operator = known[self]
        if operator is None:
            return original(self, *args, **kwargs)
        STATE.depth += 1
        try:
            execute = hidden if function_mode_count() else hand_over
            return execute(attachment, operator, functools.partial(original, self), args, kwargs)
        finally:
            STATE.depth -= 1

    setattr(call, _MARK, True)
    return hastened(call)
