"""Calls of modules: their scopes, what is shown of them, and their recomputation.

Owns the state of a thread around a call, what happens to contexts of models that are gone, and what
a failure of the driver's own work means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch import nn

from amanda_core.driver_kit import Activation, Scope, Scopes, Session, Sites, enter_zone
from amanda_driver_torch.gradients.records import OpRecord
from amanda_driver_torch.groups import WRAPPERS
from amanda_driver_torch.identity.frames import BOUNDARY
from amanda_driver_torch.interception.checkpoint import is_foreign_rerun
from amanda_driver_torch.interception.forward_calls import ForwardCalls, running_forwards
from amanda_driver_torch.interception.interceptor import Interceptor
from amanda_driver_torch.operators.module_values import INPUT, OUTPUT, replace_first
from amanda_driver_torch.operators.operator import Args, Kwargs, Operator, Original
from amanda_driver_torch.threads.modes import call_without_modes
from amanda_driver_torch.threads.state import STATE, Watcher, call_quietly
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.internals import RELEASE
from amanda_driver_torch.torch_internals.modules import inner_of, wraps, wraps_compiled

__all__ = ["NAMESPACE", "ModuleCalls"]

T = TypeVar("T")

NAMESPACE = f"pytorch/{RELEASE}/eager"


class ModuleCalls:
    """The calls of modules under one session.

    Attributes:
        session: The session.
        scopes: The modules that have been called.
        first_runs: Checkpointed functions that run for the first time now, from the outermost one.
        forward_calls: Modules whose `forward` the program calls.
    """

    session: Session
    scopes: Scopes
    first_runs: list[Any]
    forward_calls: ForwardCalls
    #: Whether the op that was resolved last is of a module that was not called.
    _not_called = False
    #: The module whose call the compiled module around it has announced, until it is called.
    _announced: nn.Module | None = None
    _interceptor: Interceptor
    _sites: Sites[OpRecord]
    execute: Callable[..., Any]

    def report_failure(self, error: Exception, where: str) -> None:
        """Raise an error of the driver, or list it so that the program can go on.

        Args:
            error: The error.
            where: The type of the operator, or what else of the program the driver was at.
        """
        self.session.failures.report(error, NAMESPACE, where)

    def attempt(self, where: str, otherwise: T, work: Callable[..., T], *arguments: object) -> T:
        """Do work of the driver that runs nothing of the program.

        Args:
            where: As for `report_failure`.
            otherwise: What to return if it fails and the program goes on.
            work: Does the work.
            arguments: Its arguments.
        """
        try:
            return work(*arguments)
        except Exception as error:
            self.report_failure(error, where)
            return otherwise

    def call_module(self, module: nn.Module, original: Original, args: Args, kwargs: Kwargs) -> Any:
        """Call a module inside its scope.

        An outermost module that wraps another has the scope of the other one, which code of a
        compiled callable may not call. Elsewhere it has none.
        """
        activations, entered = STATE.activations, module
        if wraps(module):
            WRAPPERS[id(module)] = ref(module, partial(WRAPPERS.pop, id(module)))
            if activations:
                return original(module, *args, **kwargs)
            entered = inner_of(module)
        try:
            scope = self.enter_module(entered, activations[-1] if activations else None)
            activation = self._interceptor.activation(scope)
        except Exception as error:
            self.report_failure(error, f"calls of {type(module).__name__}")
            return original(module, *args, **kwargs)
        session, path = self.session, activation.scope.path
        if STATE.opaque and STATE.backward and is_foreign_rerun():
            return call_quietly(original, module, *args, **kwargs)
        # A recomputation is a part of the call that it belongs to.
        is_outermost = not activations and not path
        is_call = session.watches_calls and is_outermost and not STATE.backward
        # The module inside is entered and shown when it is called itself. That of a compiled module
        # may be called by a method that was bound before tools were applied, which is not seen.
        before, is_compiled = self._announced, wraps_compiled(module, entered)
        announces = module is not before and (entered is module or is_compiled)
        self._announced = entered if is_compiled else None
        is_entered = session.watches_scopes and announces
        is_shown = session.watches_values and announces
        opaque, recomputing = STATE.opaque, STATE.recomputing
        depth = len(activations)
        try:
            STATE.opaque, STATE.recomputing = 0, recomputing or bool(opaque and STATE.backward)
            activations.append(activation)
            if is_call:
                self._begin_call(activation.scope, args, kwargs)
            if is_entered:
                session.enter_scope(path)
            if opaque:
                run, call = self._interceptor.call_inside, (module, original, args, kwargs)
                result = run(self._call_shown, *call, path, is_shown)
            elif is_shown:
                result = self._call_shown(module, original, args, kwargs, path)
            else:
                result = original(module, *args, **kwargs)
            session.raise_pending()
            del activations[depth:]  # There may be fewer: the tools were removed inside the call.
            STATE.opaque, STATE.recomputing = opaque, recomputing
            return result
        except BaseException as error:
            del activations[depth:]
            STATE.opaque, STATE.recomputing = opaque, recomputing
            self.module_failed(error)
            raise
        finally:
            self._announced = None
            if is_entered:
                session.leave_scope(path)
            if is_call:
                session.calls.leave()

    def _call_shown(
        self,
        module: nn.Module,
        original: Original,
        args: Args,
        kwargs: Kwargs,
        path: str,
        is_shown: bool = True,
    ) -> Any:
        if not is_shown:
            return original(module, *args, **kwargs)
        args, kwargs = self._shown(INPUT, path, (args, kwargs))
        return self._shown(OUTPUT, path, original(module, *args, **kwargs))

    def call_forward(
        self, module: nn.Module, original: Original, args: Args, kwargs: Kwargs
    ) -> Any:
        """Run the `forward` of a module, which the program calls instead of the module."""
        if wraps(module):
            return original(module, *args, **kwargs)
        top = STATE.activations[-1] if STATE.activations else None
        what = f"calls of {type(module).__name__}"
        if top is not None and self.attempt(what, top.scope, self.enter_module, module, top) is (
            top.scope
        ):
            return original(module, *args, **kwargs)  # An overriding `forward` calls it.
        return self.call_module(module, original, args, kwargs)

    def _begin_call(self, scope: Scope, args: Any, kwargs: dict[str, Any]) -> None:
        session = self.session
        epoch, enter = session.epoch, session.calls.enter
        held = partial(self.scopes.held, scope.root)
        self.attempt(scope.path, None, enter, NAMESPACE, scope.root, args, kwargs, held)
        if session.epoch != epoch:
            for run in self.first_runs:
                run.take_epoch()

    def _shown(self, operator: Operator, path: str, value: Any) -> Any:
        """Show the first tensor in the input or output of a module as that of an operator."""
        if not self.session.calls.shows(operator.op_type, path):
            return value

        def show(tensor: torch.Tensor) -> Any:
            return call_without_modes(self.execute, operator, operator.func, (tensor,), {})

        return self.attempt(path, value, replace_first, value, show)

    def enter_module(self, module: nn.Module, parent: Activation | None) -> Scope:
        """Return the scope of a module called inside `parent`."""
        outer = parent.scope if parent is not None else None
        if outer is None:
            running = [one for one in running_forwards(around_call=True) if one[0] is not module]
            if running:
                self.forward_calls.begun(running)
                outer = self._scope_of(running, None)
            else:
                self.forward_calls.foresee(module)
        scope = self.scopes.enter(module, outer, STATE.backward > 0)
        if self.scopes.dead:
            self._sweep()
        return scope

    def run_inside(self, scope: Scope) -> tuple[Scope, CodeType] | None:
        """Return the scope of a module inside `scope` whose `forward` runs, and its code."""
        if native is not None and native.runs_called_module(nn.Module):
            return None
        running = running_forwards()
        if not running:
            return None
        outer = scope if scope.root or scope.zone else None
        found = self._scope_of(running, outer)
        if found is None or found is outer:
            return None
        self.forward_calls.begun(running)
        self._not_called = True
        return found, running[0][1]

    def _scope_of(
        self, running: Sequence[tuple[nn.Module, CodeType]], outer: Scope | None
    ) -> Scope | None:
        """Return the scope of the innermost module whose `forward` runs inside `outer`."""
        for module, _ in reversed(running):
            if wraps(module):
                continue
            if outer is None:
                self.forward_calls.foresee(module)
            outer = self.scopes.enter(module, outer, STATE.backward > 0)
        return outer

    def enter_zone(self, zone: str, frame: FrameType | None = None) -> Callable[[], None]:
        """Let operators belong to a zone; return a function that ends this.

        Args:
            zone: The zone.
            frame: The frame that enters it and leaves it, if all that runs in between is the zone.
        """
        make = partial(self._interceptor.activation, frame=frame)
        return enter_zone(zone, self.scopes, STATE.activations, make)

    def trace_module(
        self, module: nn.Module, parent: Activation | None
    ) -> tuple[Scope, list[tuple[nn.Module, str]]] | None:
        """Return the scope of a module and what it depends on, for the native interceptor.

        Returns:
            The scope; None for a module that wraps another and is not outermost.
        """
        if wraps(module):
            WRAPPERS[id(module)] = ref(module, partial(WRAPPERS.pop, id(module)))
            if parent is not None:
                return None
            module = inner_of(module)
        scope = self.enter_module(module, parent)
        outer = parent.scope if parent is not None else None
        return scope, self.scopes.holders(module, scope, outer)

    def module_failed(self, error: BaseException) -> None:
        """Raise a routine's pending exception instead of `error`, which leaves a module's call."""
        # torch may have turned a routine's TypeError into "unsupported operand".
        self.session.raised(error)
        self.session.raise_pending()

    def call_resumed(self, activations: list[Activation], function: Callable[..., T]) -> T:
        """Call what recomputes with the state of the first run, on whatever thread it runs."""
        control = self.session.control
        before = STATE.attachment, STATE.activations, STATE.opaque, STATE.recomputing
        enabled = control.enabled
        try:
            STATE.attachment, STATE.activations = cast("Watcher", self), activations
            STATE.opaque, STATE.recomputing, control.enabled = 0, True, True
            result = self._interceptor.call_inside(function)
            STATE.attachment, STATE.activations, STATE.opaque, STATE.recomputing = before
            control.enabled = enabled
            return result
        except BaseException:
            STATE.attachment, STATE.activations, STATE.opaque, STATE.recomputing = before
            control.enabled = enabled
            raise

    def _sweep(self) -> None:
        """Forget contexts of models that are gone, and of paths that got another module."""
        dead = set(self.scopes.take_dead())

        def gone(key: Any) -> bool:
            root, path = _place_of(key)
            return (root, None) in dead or (root, path) in dead

        for context in self.session.contexts():
            owner = context.forward if context.forward is not None else context
            if gone(owner.site.key):
                self.session.forget(context)
        self._sites.discard(lambda record: gone(record.site.key))
        self._interceptor.forget()
        self.scopes.free(root for root, path in dead if path is None)


# The native interceptor calls it without a frame of the replaced `Module.__call__`.
BOUNDARY[id(ModuleCalls.call_module.__code__)] = ModuleCalls.call_module.__code__


def _place_of(key: Any) -> tuple[str | None, str | None]:
    """Return the root and module path in the key of an op or of a leaf's gradient accumulation."""
    if key[0] == "op":
        return key[1], key[2]
    if key[0] == "accumulate" and key[1][0] == "parameter":
        return key[1][1], key[1][2].rpartition(".")[0]
    return None, None
