"""The interceptor in pure Python: a `TorchFunctionMode` that passes operators to the attachment.

Owns the mode, and what it does with each kind of function that torch's protocol reports.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from amanda_core.driver_kit import Activation, Scope, Sites
from amanda_core.interface import CoverageGap
from amanda_driver_torch.gradients.records import OpRecord
from amanda_driver_torch.interception.coverage_limits import LIMITS
from amanda_driver_torch.interception.joining import joins
from amanda_driver_torch.interception.patches import PATCHES, as_operators
from amanda_driver_torch.interception.transparent_wrappers import (
    has_override,
    make_transparent,
    run_transparently,
)
from amanda_driver_torch.operators.bindings import is_operator_name
from amanda_driver_torch.operators.operator import Args, Kwargs, Operator
from amanda_driver_torch.threads.modes import call_without_modes, in_users_modes
from amanda_driver_torch.threads.state import STATE, Watcher
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.internals import (
    LOOKED_AWAY,
    function_mode_at,
    function_mode_count,
    nested_bindings,
    pop_function_mode,
    push_function_mode,
)

__all__ = ["FunctionModeInterceptor"]

R = TypeVar("R")

# Namespaces in which functions of other modules look up `has_torch_function`: `F.max_pool2d` is
# defined in another module, and `torch.nn.init` uses the qualified name.
_ASKED_ELSEWHERE = (torch.nn.functional, torch.functional, torch.overrides)


# Bindings that torch's function protocol does not report.
_UNREPORTED = (
    (torch, "from_numpy"),
    (torch, "frombuffer"),
    (nested_bindings, "nested_tensor"),
)


#: The module of functions that write their arguments through a process group.
_COLLECTIVES = "torch.distributed.distributed_c10d"


class FunctionModeInterceptor:
    """Sees what torch's function protocol reports in the thread that starts it."""

    name = "function_mode"
    watch = None
    #: torch calls the protocol inside the code that turns a TypeError into NotImplemented.
    hides_type_errors = True

    def __init__(self, attachment: Watcher, sites: Sites[OpRecord]) -> None:
        self._mode = _Mode(attachment)
        self.locate = sites.locate

    def start(self) -> None:
        """Start intercepting in this thread."""
        for namespace in _ASKED_ELSEWHERE:
            make_transparent(vars(namespace))
        PATCHES.add_found(as_operators, *((owner, name, name) for owner, name in _UNREPORTED))
        self.ask()
        self.enter_thread()

    def enter_thread(self) -> None:
        """Intercept in this thread, after another one, which has ended."""
        if isinstance(STATE.mode, _Mode):
            STATE.mode.leave()  # Its tools were removed by another thread.
        STATE.mode = self._mode
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self, elsewhere: bool = False, keep: bool = False) -> None:
        """Stop intercepting, even if other modes were pushed since and are still active.

        In another thread the mode stays, and passes all calls on.
        """
        if elsewhere:
            return
        STATE.mode = None
        self._mode.leave()

    def ask(self) -> None:
        """Let threads that are not intercepted ask again, at a call of a module."""
        if native is not None:
            native.set_ask(lambda op: joins(op or "module"))

    def call_inside(self, function: Callable[..., R], *args: Any) -> R:
        """Call `function` and intercept its operators, although an operator is running."""
        stack = range(function_mode_count())
        if any(function_mode_at(i) is self._mode for i in stack):
            return function(*args)
        with self._mode:  # Interrupted, it is left when this stops.
            return function(*args)

    def activation(
        self, scope: Scope, around: Activation | None = None, frame: types.FrameType | None = None
    ) -> Activation:
        """Return an activation for a call of a module, or for a zone in `around`."""
        return Activation(scope)

    def forget(self) -> None:
        """Do nothing: this interceptor keeps no records."""

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what the function protocol does not report."""
        return LIMITS[self.name]


class _Mode(TorchFunctionMode):
    def __init__(self, attachment: Watcher) -> None:
        super().__init__()
        self._attachment = attachment
        self._above: list[Any] = []
        self._operators: dict[Any, Operator | None] = {}

    def leave(self) -> None:
        while any(function_mode_at(i) is self for i in range(function_mode_count())):
            top = function_mode_at(function_mode_count() - 1)
            if top is not self and self._above[-1:] != [top]:
                self._above.append(top)  # First: an exception may come between.
            pop_function_mode()
        while self._above:
            count = function_mode_count()
            if not count or function_mode_at(count - 1) is not self._above[-1]:
                push_function_mode(self._above[-1])
            del self._above[-1]

    def __torch_function__(
        self, func: Any, types_: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if type(func) is types.FunctionType:
            if not self._attachment.watching():
                return func(*args, **kwargs)
            return self._call_wrapper(func, args, kwargs)
        try:
            operator = self._operators[func]
        except KeyError:
            if not self._attachment.watching():  # Dynamo, which may be tracing this, stops here.
                return func(*args, **kwargs)
            try:
                operator = self._operators[func] = Operator.of(func)
            except Exception as error:
                self._attachment.report_failure(error, str(getattr(func, "__name__", func)))
                operator = None
        # Metadata first, since it is half of what the protocol reports.
        if operator is None or not self._attachment.watching():
            return func(*args, **kwargs)
        return self._execute(operator, func, args, kwargs)

    def _execute(self, operator: Operator, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if not function_mode_count():
            return self._attachment.execute(operator, func, args, kwargs)
        # Modes entered before ours must see the operator, but not the driver's own work.
        execute = self._attachment.execute
        return call_without_modes(execute, operator, in_users_modes(func), args, kwargs)

    def _call_wrapper(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a Python function of torch so that the operators inside it are seen."""
        name = func.__name__
        if name in LOOKED_AWAY or func.__module__ == _COLLECTIVES:
            return func(*args, **kwargs)
        operator = None
        try:
            # The subclass overrides this very function, so the function is the operator. One that
            # asks again checks for modes in an unknown way: this avoids endless recursion.
            opaque = (
                has_override(args)
                or has_override(tuple(kwargs.values()))
                or (STATE.transparent and STATE.transparent[-1] is func)
            )
            if not opaque:
                make_transparent(func.__globals__)
            elif func.__module__ == "torch.nn.functional" or is_operator_name(name):
                operator = Operator(func, func, name)
        except Exception as error:
            self._attachment.report_failure(error, name)
            opaque = True
        if not opaque:
            return run_transparently(self, func, args, kwargs)
        if operator is None:
            return func(*args, **kwargs)
        return self._execute(operator, func, args, kwargs)
