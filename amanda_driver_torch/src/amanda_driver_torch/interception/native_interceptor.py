"""The native interceptor: torch's own bindings, redirected while a session is attached.

Owns the description of operators for the extension (which bindings are operators, and how each is
called), and operators that are not bindings. `native/` handles the calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from amanda_core.driver_kit import (
    THREAD,
    Activation,
    Code,
    Memoized,
    Patches,
    Scope,
    Session,
    Sites,
    Step,
    WeakValue,
    weakly,
)
from amanda_core.interface import CoverageGap, annotate
from amanda_driver_torch.execution.execute import Execution
from amanda_driver_torch.gradients.driver_nodes import tap
from amanda_driver_torch.gradients.records import OpRecord
from amanda_driver_torch.identity.zones import may_decide_zone
from amanda_driver_torch.interception.coverage_limits import LIMITS
from amanda_driver_torch.interception.interceptor import Handler
from amanda_driver_torch.interception.joining import joins
from amanda_driver_torch.interception.patches import PATCHES, as_operators
from amanda_driver_torch.interception.tracing import FAKE_TENSOR_CHECKS
from amanda_driver_torch.operators.bindings import is_operator, operators, type_name
from amanda_driver_torch.operators.operator import Operator
from amanda_driver_torch.threads.modes import (
    call_hidden,
    call_with_gradients,
    call_without_modes,
    in_users_modes,
    is_observed,
)
from amanda_driver_torch.threads.state import STATE, call_quietly
from amanda_driver_torch.torch_internals import versions
from amanda_driver_torch.torch_internals.extension import hastened, native
from amanda_driver_torch.torch_internals.internals import (
    BUILD,
    FUNCTIONS,
    TENSOR_METHODS,
    FunctionBase,
    OpOverload,
    OpOverloadPacket,
    function_mode_count,
    make_saved_tensor,
    next_sequence,
    some_binding,
    top_saved_tensor_hooks,
)
from amanda_driver_torch.torch_internals.native_fields import WatchFields
from amanda_driver_torch.torch_internals.tensor_attributes import is_weight

__all__ = ["NativeInterceptor", "why_hooked_by_python"]

R = TypeVar("R")


class NativeInterceptor:
    """Sees every call of a torch binding in the thread that starts it."""

    name = "native"
    #: It runs outside of the code that turns a TypeError into NotImplemented.
    hides_type_errors = False

    def __init__(self, attachment: Handler, execution: Execution, sites: Sites[OpRecord]) -> None:
        self._refused = _define()
        self._attachment, self._execution, self._sites = attachment, execution, sites
        self._kept: list[Any] | None = None
        self._session = attachment.session
        self.watch = native.Watch(self._fields())
        self.locate = self.watch.locate
        self.forget = self.watch.forget

    def _fields(self) -> WatchFields:
        attachment, execution, sites = self._attachment, self._execution, self._sites
        return WatchFields(
            session=attachment.session,
            get_control=lambda: THREAD.control,
            execute=_ways(attachment.execute_known, _hide_except_original),
            settle=_ways(execution.settle, _hide_from_modes),
            call_module=attachment.call_module,
            enter_module=attachment.trace_module,
            module_failed=attachment.module_failed,
            scopes=attachment.scopes,
            resume=_ways(execution.resume, _hide_except_original),
            edit=execution.edit,
            saved_tensors=(make_saved_tensor, top_saved_tensor_hooks),
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

    def resume(self, execution: Execution) -> None:
        """Serve the attachment's new session with what `stop` has kept."""
        self._session, self._execution = self._attachment.session, execution
        kept, self._kept = self._kept or [], None
        self.watch.resume(self._fields(), kept)

    def start(self) -> None:
        """Start intercepting in this thread."""
        _learn_graphs()
        if not hasattr(OpOverload.__call__, _MARK):
            PATCHES.add_found(_find_unredirected, *self._refused)
        _REDIRECTION.acquire(self)
        self.enter_thread()
        self.ask()
        if self._session.host is not None:
            native.share(True)

    def enter_thread(self) -> None:
        """Do nothing: the redirected functions find the attachment."""

    def ask(self) -> None:
        """Let threads that are not intercepted ask again whether they are to be."""
        native.set_ask(joins)

    def stop(self, elsewhere: bool = False, keep: bool = False) -> None:
        """Stop intercepting; with the last session, restore the bindings."""
        _REDIRECTION.release(self)
        if elsewhere:  # What that thread is inside of keeps what it needs.
            return
        if keep:
            self._kept = self._kept or self.watch.suspend()
        else:
            self.watch.close()

    def call_inside(self, function: Callable[..., R], *args: Any) -> R:
        """Call `function` and intercept its operators, although an operator is running."""
        depth = STATE.depth
        try:
            STATE.depth = 0
            result = function(*args)
            STATE.depth = depth
            return result
        except BaseException:
            STATE.depth = depth
            raise

    def activation(
        self, scope: Scope, around: Activation | None = None, frame: FrameType | None = None
    ) -> Activation:
        """Return the extension's activation for a call of a module, or for a zone in `around`."""
        activation: Activation = native.Activation(scope, around, frame)
        return activation

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what the redirected tables do not show."""
        return [
            *LIMITS[self.name],
            *(CoverageGap(f"early references to {n}", why) for n, why in self._refused.items()),
        ]


class _Redirection(Patches):
    """The redirection of torch's bindings."""

    def install(self) -> None:
        self.afterwards(native.uninstall)
        native.install()


_REDIRECTION = _Redirection()


def _ways(
    function: Callable[..., R], hide: Callable[[Callable[..., R]], Callable[..., R]]
) -> tuple[Callable[..., R], Callable[..., R]]:
    """Return a function to call without function modes, and the one to call with them."""
    return function, hide(function)


def _hide_except_original(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that user's function modes see only the original, its third argument."""

    def run(record: Any, operator: Any, call: Callable[..., Any], *rest: Any) -> Any:
        return call_without_modes(function, record, operator, in_users_modes(call), *rest)

    return run


def _hide_from_modes(function: Callable[..., R]) -> Callable[..., R]:
    """Wrap `function` so that the user's function modes do not see it."""
    return functools.partial(call_without_modes, function)


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
        lambda one, op_type: Operator(one, one, op_type),
        binding,
        torch.is_grad_enabled,
        next_sequence,
        function_mode_count,
        is_observed,
        FAKE_TENSOR_CHECKS,
    )


def why_hooked_by_python() -> str:
    """Return why Python registers all hooks on backward nodes; empty if the extension does."""
    _define()
    return _learn_graphs()


def _learn_graphs() -> str:
    """Let the extension find out how torch keeps graphs, unless it knows, or must not.

    Returns:
        Why Python registers all hooks, or an empty string.
    """
    why = versions.why_hooked_by_python(BUILD)
    if why:
        native.forget_graphs()
        return why
    if native.knows_graphs():
        return ""
    found = call_quietly(
        call_without_modes, call_hidden, (), call_with_gradients, True, _show_graph
    )
    return "" if found else "graphs are not laid out in memory as expected"


def _show_graph() -> bool:
    with torch.inference_mode(False):
        leaf, other = (torch.ones(1, device="cpu", requires_grad=True) for _ in range(2))
        one, two = leaf.exp(), other.exp()
        found: bool = native.learn_graphs(nn.Parameter, FunctionBase, leaf, one, two, one * two)
    return found


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
#: Operator of the dispatcher -> what stands for it; None for those that are none.
_KNOWN: dict[Any, Operator | None] = {}


def _find_unredirected(*refused: str) -> Iterator[tuple[Any, str, Any]]:
    for kind in (OpOverload, OpOverloadPacket):
        yield kind, "__call__", _dispatcher_call(kind.__call__)
    for name in refused:
        owner, _, attribute = name.rpartition(".")
        if owner == FUNCTIONS or hasattr(torch, attribute):
            yield from as_operators((torch, attribute, attribute))


def _dispatcher_call(original: Callable[..., Any]) -> Callable[..., Any]:
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
        try:
            operator = _KNOWN[self]
        except KeyError:
            try:
                operator = Operator(self, self, type_name(self)) if is_operator(self) else None
            except Exception as error:
                attachment.report_failure(error, str(self))
                return original(self, *args, **kwargs)
            _KNOWN[self] = operator
        if operator is None:
            return original(self, *args, **kwargs)
        try:
            STATE.depth += 1  # It was 0.
            execute = hidden if function_mode_count() else hand_over
            result = execute(attachment, operator, functools.partial(original, self), args, kwargs)
            STATE.depth = 0
            return result
        except BaseException:
            STATE.depth = 0
            raise

    setattr(call, _MARK, True)
    return hastened(call)
