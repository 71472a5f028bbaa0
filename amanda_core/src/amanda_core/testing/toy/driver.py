"""A complete driver of the framework `toy`, built on the parts that drivers share.

`registered` makes it available, so that tools can be tried without a framework. It shows facts and
site keys, values edited beside the tape, raw backward ops, and aligned gradients by gates around an
op. Its hooks are methods and not those of `declared_hooks`, because tests change what they answer.
It is one long file so that it can be read from top to bottom.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from amanda_core.driver_kit import (
    BackwardOp,
    Declarations,
    ForwardProgram,
    OpContext,
    OpRecord,
    Plan,
    Routes,
    Run,
    Session,
    Step,
    deferring,
    join,
    several,
)
from amanda_core.interface import (
    CoverageGap,
    DriverInfo,
    Facts,
    Finding,
    IPoint,
    Site,
    Storage,
    hookimpl,
)
from amanda_core.plugins import discovery
from amanda_core.testing.toy import framework as toy

__all__ = ["ToyDriver", "call_site", "registered"]

DECLARATIONS = Declarations(__package__)
CAPABILITIES = DECLARATIONS.info.capabilities_in("eager")
#: Modules that are not the user's program.
OWN = {__name__, toy.__name__, Routes.__module__}
REPLACED = ("dispatch", "backward", "scope_entered", "scope_left", "update")


class ToyFacts(Facts):
    """Facts about tensors: a `toy.Value` is a number of 8 bytes; a gradient is a plain float."""

    def is_tensor(self, value: Any) -> bool:
        """Return True for a value of the framework."""
        return isinstance(value, toy.Value)

    def dtype(self, tensor: toy.Value) -> str:
        """Return the type of Python's floats."""
        return "float64"

    def shape(self, tensor: toy.Value) -> tuple[int, ...]:
        """Return the shape of a single number."""
        return ()

    def nbytes(self, tensor: toy.Value) -> int:
        """Return the size of one number."""
        return 8

    def storage(self, tensor: toy.Value) -> Storage:
        """Return the memory of the value, which it shares with no other."""
        return Storage(id(tensor), 8, tensor)

    def tensor(self, values: Any, like: toy.Value) -> toy.Value:
        """Return a value of a number."""
        return toy.Value(float(values))

    def values(self, tensor: toy.Value) -> float:
        """Return the number."""
        return tensor.data


class Interception(Routes):
    """Routes functions of the framework to methods of the attachment that have their names.

    Attributes:
        vanilla: The functions that were found, by name.

    Args:
        functions: The functions, each with the module that holds it.
    """

    def __init__(self, functions: Sequence[tuple[Any, str]]) -> None:
        super().__init__()
        self._functions, self.vanilla = functions, dict[str, Callable[..., Any]]()

    def joins(self, name: str, arguments: Sequence[Any]) -> bool:
        """Return True if an operator has given its thread an attachment."""
        return name == "dispatch" and join("toy", arguments[0].name)

    def install(self) -> None:
        """Replace the functions."""
        for owner, name in self._functions:
            self.vanilla[name] = getattr(owner, name)
            self.route(owner, name, partial(_called, name))


def _called(name: str, attachment: ToyAttachment, _: object, *args: Any, **kwargs: Any) -> Any:
    return getattr(attachment, name)(*args, **kwargs)


class _Unrecorded:
    def unrecorded(self) -> AbstractContextManager[object]:
        return toy.no_grad()


class BackwardStep(_Unrecorded, BackwardOp):
    """One execution of a node of the backward program."""


class Execution(_Unrecorded, ForwardProgram):
    """One execution of an op.

    Between two gates, which are nodes of the tape around its own ones, runs its backward program.
    """

    def __init__(self, attachment: ToyAttachment, record: OpRecord, op: toy.Op) -> None:
        super().__init__(attachment.session, record, op, input_names=op.inputs)
        self.attachment = attachment

    def edited(self, old: Any, new: Any) -> Any:
        """Return the new value at the old one's place on the tape."""
        if isinstance(new, list):
            return [self.edited(o, n) for o, n in zip(old, new, strict=True)]
        if new is None or old is None:
            return new
        return toy.Value(new.data, old.edge, name=old.name)

    def compute(self, context: OpContext, replacement: Step | None, values: list[Any]) -> list[Any]:
        """Return the outputs of the op, or of its replacement, on inputs behind a gate."""
        self.context = context
        self.aligned = BackwardStep(self.session, self.record.site, self.raw, context)
        self.lower = self._lower_gate(values)
        slots = itertools.count()

        def behind(value: toy.Value | None) -> toy.Value | None:
            edge = self.lower, next(slots)
            return value and toy.Value(value.data, value.edge and edge, value.name)

        values = toy.mapped(behind, values)
        if replacement is not None:
            return several(replacement.replace(values))
        return list(self.attachment.vanilla["dispatch"](self.raw, values))

    def leaving(self, outputs: list[Any]) -> list[Any]:
        """Watch the nodes of the op, and return its outputs in front of a gate if it needs one."""
        if self.session.wants_backward:
            for ordinal, node in enumerate(_between(outputs, self.lower)):
                self.attachment.watch(node, (ordinal, node.name), self.context)
            leaves = self.attachment.leaves
            for node, _ in filter(None, self.lower.edges):
                if node.name == "AccumulateGrad" and node not in leaves:
                    leaves[node] = self.attachment.watch(node, ("leaf", len(leaves)), None)
        plan = self.context.plan(IPoint.BEFORE_BACKWARD)
        if not plan:
            return outputs
        upper = self._upper_gate(outputs, plan)
        return [toy.Value(o.data, o.edge and (upper, n)) for n, o in enumerate(outputs)]

    def _lower_gate(self, values: list[Any]) -> toy.Node:
        """Return a node that gets the op's contributions to the gradients of its inputs."""
        edges = [value and value.edge for value in toy.flat(values)]
        # Do not keep the values: the tape would keep them alive.
        places = toy.mapped(lambda value: None, values)
        context, aligned, guarded = self.context, self.aligned, self.attachment.guarded

        def run(gradients: toy.Gradients) -> toy.Gradients:
            # Only the analysis after the op tells what is needed.
            plan = context.plan(IPoint.AFTER_BACKWARD)
            if not plan or not aligned.is_active:
                return gradients

            def leave(given: list[Any]) -> list[Any]:
                rest = iter(given)
                by_input = toy.mapped(lambda place: next(rest), places)
                return toy.flat(aligned.execute(plan, by_input))

            return guarded(leave, gradients)

        return toy.Node("", run, edges, len(edges))

    def _upper_gate(self, outputs: list[Any], plan: Plan) -> toy.Node:
        """Return a node that gets the gradients of the op's outputs.

        If the backward program is replaced, it sends the results to the lower gate.
        """
        aligned, guarded = self.aligned, self.attachment.guarded
        slots = [(self.lower, slot) for slot in range(self.lower.arity)]

        def run(gradients: toy.Gradients) -> toy.Gradients:
            if not aligned.is_active:
                return [*gradients, *[None] * len(slots)]
            new = guarded(partial(aligned.execute, plan), gradients)
            if plan.replacement is None:
                return [*new, *[None] * len(slots)]
            found = toy.flat(several(plan.replacement.replace(new)))
            return [*[None] * len(new), *found, *[None] * (len(slots) - len(found))]

        return toy.Node("", run, [*(output.edge for output in outputs), *slots], len(outputs))


class ToyAttachment:
    """Holds the framework for one session."""

    execution_type: type[Execution] = Execution
    mode = "eager"

    def __init__(self, driver: ToyDriver, session: Session) -> None:
        self.driver, self.session = driver, session
        self.facts, self.namespace = driver.facts, f"toy/{toy.__version__}/{self.mode}"
        self.thread = threading.get_ident()
        #: The ops by place of call. They outlive this attachment: tools may be applied again.
        self.records: dict[Any, OpRecord] = session.persistent("toy.records", dict)
        self.leaves: dict[toy.Node, Any] = {}
        self._attached, self._began = True, (self.thread, toy.is_recording())
        session.at_close(self.detach)
        driver.interception.attach(self)
        self.vanilla = driver.interception.vanilla

    def enter_thread(self) -> None:
        """Intercept in this thread."""
        self.thread = threading.get_ident()
        self.driver.interception.move(self)

    def ask(self) -> None:
        """Do nothing: each operator of a thread without an attachment calls `join` anyway."""

    def detach(self) -> None:
        """Restore the framework."""
        if not self._attached:
            return
        for node, wrapper in self.leaves.items():
            node.wrappers[:] = [other for other in node.wrappers if other is not wrapper]
        thread, recorded = self._began
        if threading.get_ident() == thread:
            toy.record(recorded)  # An exception may have kept `no_grad` from doing so.
        self.driver.release(self)
        self._attached = False

    def coverage(self) -> Sequence[CoverageGap]:
        """Describe what is not instrumented."""
        return DECLARATIONS.gaps()

    # Replacements of the framework's functions.

    def scope_entered(self, path: str) -> None:
        """Tell the tools."""
        if self.session.watches_calls and "." not in path:
            self.session.calls.enter(self.namespace, path, (), {})
        if self.session.watches_scopes:
            self.session.enter_scope(path)

    def scope_left(self, path: str) -> None:
        """Tell the tools."""
        if self.session.watches_scopes:
            self.session.leave_scope(path)
        if self.session.watches_calls and "." not in path:
            self.session.calls.leave()

    def update(self, *args: Any) -> None:
        """End a step."""
        self.vanilla["update"](*args)
        self.session.end_step()

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run the backward program, and raise what a routine raised in another thread."""
        self.vanilla["backward"](*args, **kwargs)
        self.session.raise_pending()

    def dispatch(self, op: toy.Op, arguments: list[Any]) -> tuple[Any, ...]:
        """Run an operator as planned, or as it is where no tool acts."""
        session = self.session
        if session.enabled:
            record = self.locate(op)
            if session.wants_backward or not record.is_idle(session):
                return self.execute(record, op, arguments)
        return tuple(self.vanilla["dispatch"](op, arguments))

    def execute(self, record: OpRecord, op: toy.Op, arguments: list[Any]) -> tuple[Any, ...]:
        """Run an operator as planned."""
        return tuple(self.execution_type(self, record, op).run(arguments))

    def locate(self, op: toy.Op) -> OpRecord:
        """Return the record of an op."""
        key = self.site_key(op)
        if key not in self.records:
            path, line = toy.scope_path(), call_site()[2]
            name = f"{path}/{op.name}" if path else op.name
            self.records[key] = OpRecord(Site(key, op.name, self.namespace, name, path, line))
        return self.records[key]

    def site_key(self, op: toy.Op) -> tuple[Any, ...]:
        """Return the key of an op, which is the same in each iteration and process."""
        return (toy.scope_path(), op.name, *call_site()[:2])

    def guarded(self, run: Run, gradients: Sequence[Any]) -> list[Any]:
        """Run a function of gradients; return them as they are if it fails in another thread."""
        given = list(gradients)
        if threading.get_ident() == self.thread:
            return list(run(given))
        found = deferring(self.session, run)(given)
        return given if found is None else list(found)

    def watch(self, node: toy.Node, key: Any, forward: OpContext | None) -> Any:
        """Put tools around a node of the backward program, and return the wrapper."""
        name = f"{forward.name}/{node.name}" if forward is not None else node.name
        site = Site(key, node.name, self.namespace, name)

        def wrapper(run: toy.Run, gradients: toy.Gradients) -> toy.Gradients:
            op = BackwardStep(self.session, site, node, forward)
            if not op.is_active:
                return run(gradients)
            with toy.no_grad():
                arriving = self.guarded(op.enter, gradients)
                if op.replacement is not None:
                    return self.guarded(op.leave, several(op.replacement.replace(arriving)))
                return self.guarded(op.leave, run(arriving))

        node.wrappers.append(wrapper)
        return wrapper


class ToyDriver:
    """The plugin.

    Args:
        name: First part of the namespace.
        modules: Modules whose import means that the framework is in use.
        capabilities: The capabilities that it declares.
        api: The interface number that it declares.

    Attributes:
        replaced: The functions of the framework that it replaces.
        facts: Its facts about values; None for a driver without facts.
        interception: The replaced functions, and the attachments.
        detached: How many attachments have ended.
        prepared: The types of the contexts that it has prepared.
    """

    attachment_type: type[ToyAttachment] = ToyAttachment
    replaced: Sequence[tuple[Any, str]] = [(toy, name) for name in REPLACED]

    def __init__(
        self,
        name: str = "toy",
        modules: tuple[str, ...] = DECLARATIONS.info.modules,
        capabilities: frozenset[str] | Mapping[str, frozenset[str]] = CAPABILITIES,
        api: int = DECLARATIONS.info.api,
    ) -> None:
        namespaces = (f"{name}/*/eager",)
        self.info = DriverInfo(name, modules, namespaces, capabilities, DECLARATIONS, api=api)
        self.loaded = True
        self.facts: Facts | None = ToyFacts()
        self.detached = 0
        self.prepared: list[str] = []
        self.interception = Interception(self.replaced)

    @hookimpl
    def amanda_driver_info(self) -> DriverInfo:
        """Describe the driver."""
        return self.info

    @hookimpl
    def amanda_preflight(self) -> Sequence[Finding]:
        """Report a finding about the environment."""
        return [Finding("info", "The toy framework has one version")]

    @hookimpl
    def amanda_prepare_context(self, context: OpContext) -> None:
        """Set the common type of an operator of the toy framework, and the roles of its inputs."""
        if context.namespace.startswith(f"{self.info.name}/"):
            self.prepared.append(context.op_type)
            DECLARATIONS.describe(context)

    @hookimpl
    def amanda_attach(self, session: Session) -> ToyAttachment | None:
        """Start to intercept for a session, in the thread that calls."""
        return self.attachment_type(self, session) if self.loaded else None

    def release(self, attachment: ToyAttachment) -> None:
        """Release an attachment; the last one restores the framework."""
        self.interception.detach(attachment)
        self.detached += 1


@contextmanager
def registered() -> Iterator[ToyDriver]:
    """Register a driver of the toy framework inside `with`, as if it were installed.

    ``with registered(), amanda.apply(tool): toy.relu(toy.Value(1.0))``
    """
    for found in discovery.drivers():
        if isinstance(found.plugin, ToyDriver):
            yield found.plugin
            return
    driver = ToyDriver(modules=(toy.__name__,))
    discovery.register(driver, "toy", "amanda_core.testing.toy.driver")
    try:
        yield driver
    finally:
        discovery.unregister("toy")


def call_site() -> tuple[str, int, str]:
    """Return function, bytecode offset and ``file:line`` of the first frame outside."""
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] in OWN:
        assert frame.f_back is not None
        frame = frame.f_back
    code = frame.f_code
    file = code.co_filename.rpartition("/")[2]
    return code.co_name, frame.f_lasti, f"{file}:{frame.f_lineno}"


def _between(outputs: Sequence[toy.Value], gate: toy.Node) -> list[toy.Node]:
    """Return the backward nodes of an op, from its outputs down to the gate below it."""
    found = {gate: None}
    waiting = [output.edge for output in outputs]
    while waiting:
        edge = waiting.pop(0)
        if edge is not None and edge[0] not in found:
            found[edge[0]] = None
            waiting.extend(edge[0].edges)
    return list(found)[1:]
