"""`Rewrite`: replace subgraphs of a program by other computations.

Decides when a match is rewritten and when it falls back. Patterns are in `patterns`, replacements
in `rules`, and the graph comes from `amanda_tools.graph`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

from amanda_core import OpContext, Tool
from amanda_core.engine.selection import select
from amanda_core.errors import UnsupportedError
from amanda_core.runtime.threads import original as op_itself
from amanda_core.runtime.weak import Ref
from amanda_tools.graph.model import Graph
from amanda_tools.graph.tracing import GraphTracing
from amanda_tools.kit.operators.clock import Clock
from amanda_tools.kit.operators.tool import is_eager
from amanda_tools.kit.tensors.values import facts_of
from amanda_tools.rewriting import graphs
from amanda_tools.rewriting.matches import (
    Inside,
    Match,
    Role,
    flat,
    kind_of,
    stand_in_like,
    value_at,
    write,
)
from amanda_tools.rewriting.patterns import Site, find
from amanda_tools.rewriting.result import RewriteResult
from amanda_tools.rewriting.rules import RULES, Matched, Rule, Taken

__all__ = ["Rewrite"]

Listener = Callable[[str, str, Any], Any]


class Rewrite(Tool):
    """Replaces subgraphs. The first run is traced; later runs are rewritten where a pattern
    matches.

    A match is rewritten only if no operator outside uses a value inside it. In eager modes its last
    operator returns what the rule computes, and the others return placeholders. A placeholder is
    computed after all if something else uses it, or if the run takes another path.

    Args:
        rules: Names of rules: ``conv_bn`` folds a normalization into the convolution before it,
            ``sdpa`` computes attention with one operator, ``softmax`` does the reverse. `add`
            accepts rules of your own.
        interior: ``skip`` does not compute inner values; ``run`` computes them anyway, as
            TensorFlow's eager mode always does.
        until: What ends a run: leaving the outermost ``module``, or a ``step``.

    Raises:
        ValueError: An option has an invalid value.

    >>> tool = Rewrite(rules=["conv_bn"])
    """

    whole = True
    #: As far as the rules that have a name.
    works_on = ("pytorch/*/*", "tensorflow/*/*")

    def __init__(
        self,
        rules: list[Literal["conv_bn", "sdpa", "softmax"]] | None = None,
        interior: Literal["skip", "run"] = "skip",
        until: Literal["module", "step"] = "module",
    ) -> None:
        super().__init__()
        for name in rules or ():
            if name not in RULES:
                raise ValueError(f"rules must be of {', '.join(RULES)}, not {name!r}")
        if interior not in ("skip", "run"):
            raise ValueError(f"interior must be skip or run, but is {interior!r}")
        if until not in ("module", "step"):
            raise ValueError(f"until must be module or step, but is {until!r}")
        self.interior, self.until = interior, until
        self._rules: list[Rule] = [rule for name in rules or () for rule in RULES[name]]
        self.changes_values = None if self._rules else False
        self._listeners: list[Listener] = []
        self._tracing = GraphTracing()
        self._matches: dict[tuple[str, str, int], Match] = {}
        #: Namespace and op id -> role of the operator in a match.
        self._roles: dict[tuple[str, int], Role] = {}
        self._known: dict[tuple[str, int], None] = {}
        #: Namespace and number of a rule, since several have one name -> how many nodes and edges
        #: there were when it was last searched.
        self._searched: dict[tuple[str, int], tuple[int, int]] = {}
        #: Operator of a graph -> constant inputs and attributes by name.
        self._constants: dict[tuple[str, int], dict[str, Any]] = {}
        self._met = self._is_tracing = True
        #: Identity of a value inside a match -> its origin.
        self._inside: dict[int, Inside] = {}
        self._deferred = 0
        self._depth = 0
        #: Whether a run has ended, so that matches were searched for.
        self._has_ended = False
        self._lock = threading.RLock()
        self._clock = Clock()
        self.depends_on(self._tracing)
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_scope(self._enter_module, self._leave_module)
        self.add_inst_for_step(end=lambda number: self._end_run())

    def add(self, rule: Rule) -> None:
        """Add a rule after the existing ones."""
        self._rules.append(rule)
        self.changes_values = None
        self._met = True

    def listen(self, function: Listener) -> None:
        """Call a function with the values that rewritten matches report, such as ``probabilities``.

        Args:
            function: Called with the name of the operator, the name of the value, and the value.
                Unless it returns None, its result replaces the value.
        """
        self._listeners.append(function)

    def analyse(self, context: OpContext) -> None:
        """Rewrite an operator that is part of a match."""
        if context.zone != "model":
            return
        with self._clock, self._lock:
            key = (context.namespace, context.get_op_id())
            if key not in self._known:
                self._known[key] = None
                self._met = True
            role = self._roles.get(key)
            if not is_eager(context.namespace):
                self._rewrite_node(context, key, role)
            elif role is not None and context.recomputed:
                # The result must equal that of the first run, which was not rewritten.
                role.match.refuse("a checkpoint runs it again")
            elif role is not None:
                role.names, role.attrs = context.input_names, dict(context.attrs)
                role.facts = facts_of(context)
                context.replace_op(self.finish if role.is_tail else self.defer, role=role)
            elif self._roles and self.interior == "skip":
                self._use(context.get_inputs() or (), context.name)
                context.insert_before_op(self.watch, observe=True, name=context.name)

    def watch(self, *inputs: Any, name: str) -> None:
        """Compute placeholders before an operator outside of all matches uses them."""
        if self._deferred:
            self._use(inputs, name)

    def defer(self, *inputs: Any, role: Role) -> Any:
        """Return the output of an operator inside a match: a placeholder if nothing has changed."""
        original = _original()
        with self._clock, self._lock:
            match, kind = role.match, kind_of(role.facts, inputs)
            missing = self._missing(inputs, role)
            shape = role.outputs.get(kind)
            taken = Taken(role.op.word or role.op.type, inputs, role.names, role.attrs, original)
            if match.off is None and missing is None and self.interior == "skip" and shape:
                stand_in = None
                if match.is_torch:
                    stand_in = stand_in_like(role.facts, inputs, shape)
                if stand_in is not None:
                    self._keep(stand_in, Inside(role, taken, deferred=True))
                    return stand_in
            if missing is not None:
                match.fell_back(missing)
            self._settle(inputs)
            result = original(inputs)
            value = result[0] if isinstance(result, (list, tuple)) else result
            if missing is None:
                if match.is_torch:
                    role.outputs[kind] = (tuple(value.shape), value.dtype)
                self._keep(value, Inside(role, taken, deferred=False))
            return result

    def finish(self, *inputs: Any, role: Role) -> Any:
        """Return the output of the last operator of a match: the replacement, or its own result."""
        original = _original()
        with self._clock, self._lock:
            match = role.match
            taken = Taken(role.op.word or role.op.type, inputs, role.names, role.attrs, original)
            found = self._gather(match, role, taken)
            reason = found if isinstance(found, str) else match.rule.guard(found)
            if reason is None:
                match.report.rewritten += 1
            else:
                match.fell_back(reason)
                self._settle(inputs)
        if reason is not None or isinstance(found, str):
            return original(inputs)
        return match.rule.replacement(found)

    def result(self) -> RewriteResult:
        """Return what has been rewritten so far."""
        with self._lock:
            return RewriteResult(
                [match.report for match in self._matches.values()],
                list(dict.fromkeys(rule.name for rule in self._rules)),
                tool_seconds=self._clock.spent / 1e9,
                wall_seconds=self._clock.wall / 1e9,
                notes=self._notes(),
            )

    def _notes(self) -> list[str]:
        notes = list(self._tracing.notes)
        for namespace in dict.fromkeys(namespace for namespace, _ in self._known):
            if self._rules and not any(rule.is_for(namespace) for rule in self._rules):
                backend = namespace.partition("/")[0]
                notes.append(f"not supported on {namespace}: none of the rules is for {backend}")
        if self._known and not self._has_ended:
            why = "no step ended"
            if self.until == "module":
                why = 'no module ended: use until="step", or call a module'
            notes.append(f"nothing was searched for matches, because {why}")
        return notes

    # Values inside matches.

    def _keep(self, value: Any, inside: Inside) -> None:
        key = id(value)

        def forget(dead: object) -> None:
            if self._inside.get(key) is inside:
                del self._inside[key]
                self._deferred -= inside.deferred

        inside.before = self._inside_of(value)
        inside.ref = Ref(value, forget)
        self._inside[key] = inside
        self._deferred += inside.deferred

    def _inside_of(self, value: Any) -> Inside | None:
        inside = self._inside.get(id(value))
        return inside if inside is not None and inside.ref() is value else None

    def _from(self, value: Any, role: Role, index: int) -> Inside | None:
        """Return the origin of a value, if it comes from this operator of the same match."""
        inside = self._inside_of(value)
        while inside is not None:
            if inside.role.op.index == index and inside.role.match is role.match:
                return inside
            # Operators that do nothing return their input.
            inside = inside.before
        return None

    def _missing(self, inputs: Sequence[Any], role: Role) -> str | None:
        """Return why an execution does not match: an input does not come from inside the match."""
        for place, index in role.links.items():
            if self._from(value_at(inputs, place), role, index) is None:
                return f"{role.op.name} got a value from elsewhere"
        return None

    def _gather(self, match: Match, role: Role, taken: Taken) -> Matched | str:
        """Collect the inputs of one execution of a match, or return why it does not match."""
        if match.off is not None:
            return match.off
        ops: dict[str, Taken] = {}
        inputs: dict[str, Any] = {}
        rest = [(role, taken)]
        while rest:
            one, at = rest.pop()
            missing = self._missing(at.inputs, one)
            if missing is not None:
                return missing
            ops[one.name] = at
            for name, place in one.inputs:
                value = value_at(at.inputs, place)
                if inputs.setdefault(name, value) is not value and one.facts.is_tensor(value):
                    return f"{name} is not one value"
            for place, index in one.links.items():
                inside = self._from(value_at(at.inputs, place), one, index)
                assert inside is not None
                rest.append((inside.role, inside.taken))

        def tell(name: str, value: Any) -> Any:
            for listener in self._listeners:
                given = listener(role.op.name, name, value)
                value = value if given is None else given
            return value

        return Matched(role.op.name, ops, inputs, tell)

    def _use(self, inputs: Sequence[Any], name: str) -> None:
        """Stop rewriting the matches whose placeholders an operator outside takes, and compute
        these.
        """
        with self._lock:
            for value in flat(inputs):
                inside = self._inside_of(value) if self._deferred else None
                if inside is not None and inside.deferred:
                    match = inside.role.match
                    reason = f"the value of {inside.role.op.name} is used by {name}, too"
                    match.refuse(reason)
                    match.fell_back(reason)
                    self._compute(value, inside)

    def _settle(self, inputs: Sequence[Any]) -> None:
        for value in flat(inputs):
            inside = self._inside_of(value)
            if inside is not None and inside.deferred:
                self._compute(value, inside)

    def _compute(self, value: Any, inside: Inside) -> None:
        """Write the output of an operator into its placeholder."""
        self._settle(inside.taken.inputs)
        inside.deferred = False
        self._deferred -= 1
        write(value, lambda: inside.taken.run(inside.taken.inputs), inside.grad)

    # Runs.

    def _enter_module(self, path: str) -> None:
        self._depth += 1

    def _leave_module(self, path: str) -> None:
        self._depth -= 1
        if self._depth == 0 and self.until == "module":
            self._end_run()

    def _end_run(self) -> None:
        self._has_ended = True
        with self._clock, self._lock:
            for inside in list(self._inside.values()):
                value = inside.ref()
                if value is not None and inside.deferred:
                    # The program still refers to the value, so it is a result.
                    inside.role.match.report.kept += 1
                    self._compute(value, inside)
            self._inside.clear()
            self._deferred = 0
            if not self._is_tracing and self._met:
                # The run took another path, so trace the next run again.
                self._trace(True)
            elif self._is_tracing:
                if self._match():
                    self.invalidate()
                self._trace(False)

    def _trace(self, on: bool) -> None:
        self._is_tracing, self._met = on, False
        self._tracing.where(None if on else select(lambda context: False))

    def _match(self) -> bool:
        """Search the trace for new matches; return True if there are any."""
        found = False
        for graph in self._tracing.graphs.values():
            for number, rule in enumerate(self._rules):
                if not rule.is_for(graph.namespace):
                    continue
                place = graph.namespace, number
                since = self._searched.get(place, (0, 0))
                self._searched[place] = len(graph.nodes), len(graph.edges)
                for site in find(graph, rule.pattern, since):
                    key = (graph.namespace, rule.name, site.tail.id)
                    if key in self._matches:
                        continue
                    match = self._matches[key] = Match(rule, graph, site)
                    report = match.report
                    report.refused = (
                        site.refusal(graph)
                        or (site.written(graph) if rule.saves_result else None)
                        or self._taken(graph, site)
                    )
                    if report.refused is None and not is_eager(graph.namespace):
                        report.refused = graphs.prepare(match, self._constants_in(graph))
                    if report.refused is None:
                        found = True
                        for role in match.roles:
                            self._roles[(graph.namespace, role.op.id)] = role
        return found

    def _taken(self, graph: Graph, site: Site) -> str | None:
        for op in site.ops.values():
            role = self._roles.get((graph.namespace, op.id))
            if role is not None:
                return f"{op.name} is part of {role.match.report.name} already"
        return None

    # Graphs.

    def _rewrite_node(self, context: OpContext, key: tuple[str, int], role: Role | None) -> None:
        if role is None:
            fact = context.get("graph_op")
            rules = [
                rule
                for rule in self._rules
                if fact and any(op.allows(fact) for op in rule.pattern.operators())
            ]
            if rules:
                variables = any(rule.head is not None for rule in rules)
                self._constants[key] = graphs.constants_of(context, variables)
            return
        role.names, role.attrs = context.input_names, dict(context.attrs)
        context.replace_op(graphs.replacement_of(role))

    def _constants_in(self, graph: Graph) -> dict[int, dict[str, Any]]:
        return {
            op: known for (name, op), known in self._constants.items() if name == graph.namespace
        }


def _original() -> Callable[[Sequence[Any]], Any]:
    found = op_itself()
    if found is None:
        raise UnsupportedError(
            "This driver cannot run an operator from inside of its replacement",
            fix="Rewrite with another driver",
        )
    return found
