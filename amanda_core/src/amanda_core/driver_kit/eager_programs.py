"""Eager programs of frameworks in which modules hold others, and operators are called from Python.

Owns a call of an operator, where a thread is in the calls of modules, and the tables by which its
operators have names. Drivers import it; the engine does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any, Protocol

from amanda_core.driver_kit.execution import ForwardProgram, OpRecord, backward_plans, several
from amanda_core.driver_kit.zones import enter_zone
from amanda_core.engine.context import OpContext
from amanda_core.engine.plan import Step
from amanda_core.engine.session import Session
from amanda_core.errors import UnsupportedError
from amanda_core.identity.sites import FRAMEWORK, OWN, STOP, USER, Rules, Sites
from amanda_core.interface.driver import Site
from amanda_core.modules.module_paths import inside, modules_of
from amanda_core.modules.scopes import Activation, Labels, Scope, Scopes
from amanda_core.runtime.threads import inside_routine, standing_for
from amanda_core.weights.parameters import Layouts, Parameters

__all__ = ["EagerExecution", "EagerNames", "EagerProgram", "Gates", "OpCall", "kind_by"]


@dataclass
class OpCall:
    """One call of an operator.

    Attributes:
        op_type: The framework's name of the operator.
        values: Its inputs, by position.
        run: Calls it with other inputs, and returns its result.
        names: Names of the positions, as far as they are known.
        attrs: Its other arguments.
    """

    op_type: str
    values: Sequence[Any]
    run: Callable[[Sequence[Any]], Any]
    names: tuple[str, ...] = ()
    attrs: Mapping[str, Any] | None = None

    def execute(self, values: Sequence[Any], replacement: Step | None = None) -> Any:
        """Return the result of the operator, or of its replacement.

        Operators that it calls are parts of it.
        """
        if replacement is not None:
            with standing_for(self.run):
                return replacement.replace(values)
        with inside_routine():
            return self.run(values)


def kind_by(
    package: str, call: CodeType, driver: str
) -> Callable[[CodeType, Mapping[str, Any]], int]:
    """Return `Rules.kind_of` for a framework.

    Args:
        package: Name of the framework's package.
        call: Code at which the call of a module begins.
        driver: A file of the driver's package, whose folder holds its code.
    """
    start, own = f"{package}.", os.path.dirname(driver) + os.sep

    def kind_of(code: CodeType, namespace: Mapping[str, Any]) -> int:
        if code is call:
            return STOP
        if f"{namespace.get('__name__', '')}.".startswith(start):
            return FRAMEWORK
        return OWN if code.co_filename.startswith(own) else USER

    return kind_of


@dataclass(frozen=True)
class EagerNames:
    """How a framework names its modules and parameters.

    Attributes:
        framework: The first part of the driver's namespaces.
        rules: What frames, zones and weights are.
        children_of: Returns the modules that a module holds, by name.
        parameters_of: Returns the parameters of a module itself, by name.
        layouts: Functions about tensors.
        labels: Makes a table of labels for tensors outside of modules.
    """

    framework: str
    rules: Rules
    children_of: Callable[[Any], Mapping[str, Any]]
    parameters_of: Callable[[Any], Iterator[tuple[str, Any]]]
    layouts: Layouts
    labels: Callable[[], Labels] = Labels

    def weights_of(self, module: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield the parameters of a module and of those inside it, for `Scopes`; each once."""
        seen: set[int] = set()
        for path, owner in modules_of(module, self.children_of):
            for name, parameter in self.parameters_of(owner):
                if id(parameter) not in seen:  # Modules may share a parameter.
                    seen.add(id(parameter))
                    yield inside(path, name), owner, parameter


class EagerProgram:
    """The eager program of one thread. A driver subclasses it and implements what runs an op.

    Attributes:
        session: The session.
        namespace: The namespace of its operators.
        scopes: Names of modules.
        activations: The calls of modules that are running, outermost first.
        parameters: The parameters that tensors show parts of.
        sites: The operators so far.
    """

    def __init__(self, session: Session, namespace: str, names: EagerNames) -> None:
        self.session, self.namespace = session, namespace
        self.activations: list[Activation] = []

        def shared(what: str, make: Callable[[], Any]) -> Any:
            return session.shared(f"{names.framework}.{what}", make)

        self.scopes: Scopes = shared("scopes", lambda: Scopes(names.children_of, names.weights_of))
        labels: Labels = shared("labels", names.labels)
        self.parameters: Parameters = shared(
            "parameters", lambda: Parameters(self.scopes, labels, names.layouts)
        )
        self.sites: Sites[OpRecord] = Sites(
            names.rules,
            self,
            self.scopes,
            labels,
            shared("names", dict),
            namespace,
            self.record,
            lambda record: None,
            self.parameters,
        )

    @property
    def scope(self) -> Scope | None:
        """The scope of the innermost module that is running, or None."""
        return self.activations[-1].scope if self.activations else None

    def record(self, site: Site, caller: str) -> OpRecord:
        """Return a record of a new op."""
        return OpRecord(site)

    def is_idle(self, record: OpRecord) -> bool:
        """Return True if no tool acts at an op."""
        return record.is_idle(self.session) and not self.session.wants_backward

    @contextmanager
    def calling(
        self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], again: bool = False
    ) -> Iterator[None]:
        """Let operators inside ``with`` be those of a call of a module.

        Args:
            module: The module.
            args: The arguments of the call.
            kwargs: Those that are passed by name.
            again: Whether it is called inside a backward program.
        """
        session, parent = self.session, self.scope
        scope = self.scopes.enter(module, parent, again)
        is_call = parent is None and session.watches_calls
        if is_call:
            held = partial(self.scopes.held, scope.root)
            session.calls.enter(self.namespace, scope.root, args, kwargs, held)
        if session.watches_scopes:
            session.enter_scope(scope.path or scope.root)
        depth = len(self.activations)
        try:
            self.activations.append(Activation(scope))
            yield
        finally:
            del self.activations[depth:]  # There may be fewer: the tools were removed inside.
            if session.watches_scopes:
                session.leave_scope(scope.path or scope.root)
            if is_call:
                session.calls.leave()

    def enter_zone(self, zone: str) -> Callable[[], None]:
        """Let operators belong to a zone; return a function that ends this."""
        return enter_zone(zone, self.scopes, self.activations)


class Gates(Protocol):
    """Gates on the framework's tape around an op: they run the plans of its gradients."""

    def enter(self, values: Sequence[Any]) -> list[Any]:
        """Return the inputs after a gate, which gets the op's contributions to their gradients."""
        ...

    def exit(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs after a gate, which gets their gradients first."""
        ...


class EagerExecution(ForwardProgram):
    """One execution of an op at which a tool may act, with gates around it on the tape.

    A subclass implements `new_gates`, and may extend `computed`.

    Attributes:
        call: The call.

    Args:
        program: The program of the thread.
        record: The record of the op.
        call: The call.
        opened: Further arguments of `Session.open`.
    """

    def __init__(
        self, program: EagerProgram, record: OpRecord, call: OpCall, **opened: Any
    ) -> None:
        opened |= {"attrs": call.attrs, "input_names": call.names}
        super().__init__(program.session, record, call.op_type, **opened)
        self.call: Any = call
        self._gates: Gates | None = None

    def new_gates(self, context: OpContext, values: Sequence[Any]) -> Gates | None:
        """Return gates if a tool may want the gradients of the op, which runs on these values."""
        raise NotImplementedError

    def computed(self, context: OpContext, result: Any) -> list[Any]:
        """Return the outputs of the op, or of its replacement, which has returned `result`."""
        return several(result)

    def compute(self, context: OpContext, replacement: Step | None, values: list[Any]) -> list[Any]:
        """Return the outputs of the op, or of its replacement."""
        gates = self._gates = self.new_gates(context, values)
        if gates is not None:
            with inside_routine():  # The driver's own operators.
                values = gates.enter(values)
        return self.computed(context, self.call.execute(values, replacement))

    def leaving(self, outputs: list[Any]) -> list[Any]:
        """Return the outputs after the gate of their gradients."""
        if self._gates is None:
            return outputs
        with inside_routine():
            return self._gates.exit(outputs)

    @staticmethod
    def refuse_gradient_edits(context: OpContext, what: str, fix: str) -> None:
        """Refuse edits of the gradients of an op that cannot have gates.

        Args:
            context: The context of the op.
            what: What such an op does, after "The gradients of an operator that ...".
            fix: What the program can do instead.

        Raises:
            UnsupportedError: A tool edits them.
        """
        if any(plan.edits for plan in backward_plans(context)):
            raise UnsupportedError(
                f"The gradients of an operator that {what} cannot be edited",
                where=context.where,
                fix=fix,
            )
