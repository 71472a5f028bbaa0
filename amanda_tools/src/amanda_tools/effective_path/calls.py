"""Calls of functions in TensorFlow's graphs: which values are the same inside and outside.

Reports calls that cannot be followed, such as loops. Imports no framework.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any

from amanda_tools.effective_path.model import PathEnd
from amanda_tools.effective_path.runs import Execution, Run
from amanda_tools.graph.sources import SILENT
from amanda_tools.graph.values import Port

__all__ = ["Calls"]

_FUNCTIONS = {"PartitionedCall": ("f",), "StatefulPartitionedCall": ("f",)}
_BRANCHES = {
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
}
_LOOPS = dict.fromkeys(("While", "StatelessWhile"), ("cond", "body"))
_FRAMES = ("Enter", "Exit", "Merge", "NextIteration", "Switch", "LoopCond")


@dataclass
class _Body:
    program: int
    arguments: Sequence[Port]
    results: Sequence[Port]


@dataclass(eq=False)
class _Call:
    name: str
    type: str
    program: int
    outputs: Sequence[Port]
    inputs: Sequence[Port] = ()
    bodies: list[_Body] = field(default_factory=list)
    #: Why it is not followed, or None.
    reason: str | None = None


class Calls:
    """Graph nodes that tools do not see as operators: calls, branches, loops and constants.

    Args:
        port_of: Returns the origin of a symbolic tensor, and calls `meet` if no operator produced
            it.
    """

    def __init__(self, port_of: Callable[[Any], Port]) -> None:
        self._port_of = port_of
        self._calls: list[_Call] = []
        self._by_output: dict[Port, _Call] = {}
        self._constants: set[Port] = set()
        self._programs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()

    def program_of(self, graph: Any) -> int:
        """Return the number of a graph or function body."""
        if graph not in self._programs:
            self._programs[graph] = next(self._numbers)
        return self._programs[graph]

    def meet(self, symbol: Any) -> None:
        """Record a graph node that is not an operator for the tool."""
        outputs = [self._port_of(one) for one in symbol.outputs]
        if symbol.type in SILENT:
            if SILENT[symbol.type] == "constant":
                self._constants.update(outputs)
            return
        call = _Call(str(symbol.name), str(symbol.type), self.program_of(symbol.graph), outputs)
        call.reason = self._look_into(call, symbol)
        self._calls.append(call)
        self._by_output.update((output, call) for output in outputs)

    def link(self, run: Run) -> None:
        """Unify the values on both sides of the calls in a run, and sort its executions.

        Operators that ran several times, or inside loops, are left out.
        """
        if all(execution.program is None for execution in run.executions):
            # Eager executions have numbers of their own, and come in order.
            run.fixed -= run.unseen.keys()
            return
        counts = Counter(execution.order for execution in run.executions)
        links: dict[Port, Port] = {}
        hidden = self._follow(run, links)
        kept: list[Execution] = []
        for execution in run.executions:
            times = counts[execution.order]
            if times == 1 and execution.program not in hidden:
                kept.append(execution)
                continue
            reason = f"it ran {times} times in one run"
            if times == 1:
                reason = "it ran inside a call that is not followed"
            found = PathEnd(execution.name, execution.type, reason)
            run.unseen.update((port, found) for port in execution.outputs)

        def resolved(port: Port) -> Port:
            while port in links:
                port = links[port]
            return port

        for execution in kept:
            execution.inputs = [list(map(resolved, ports)) for ports in execution.inputs]
        for port, array in list(run.arrays.items()):
            run.arrays.setdefault(resolved(port), array)
        run.fixed = {resolved(port) for port in run.fixed}
        run.fixed |= {port for port in map(resolved, links) if port in self._constants}
        run.fixed -= run.unseen.keys()
        run.executions = _ordered(kept)

    # Inside.

    def _look_into(self, call: _Call, symbol: Any) -> str | None:
        """Record the bodies and inputs of a call; return why it cannot be followed, or None."""
        kind = call.type
        attributes = (_FUNCTIONS | _BRANCHES | _LOOPS).get(kind)
        if attributes is None:
            if kind.removeprefix("Ref") in _FRAMES:
                return "control flow that is not a function is not followed"
            return "it is not an operator that the tool sees"
        function_of = getattr(symbol.graph, "_get_function", lambda name: None)
        given = [symbol.get_attr(attribute) for attribute in attributes]
        for function in given[0] if kind.endswith("Case") else given:
            body = getattr(function_of(function.name), "graph", None)
            if body is None:
                return "its function has no graph that can be read"
            arguments, results = map(self._port_of, body.inputs), map(self._port_of, body.outputs)
            program = self.program_of(body)
            call.bodies.append(_Body(program, list(arguments), list(results)))
        if kind in _LOOPS:
            return "loops are not followed"
        # The first input of a branch is the condition.
        call.inputs = [self._port_of(one) for one in symbol.inputs[kind in _BRANCHES :]]
        return None

    def _follow(self, run: Run, links: dict[Port, Port]) -> set[int]:
        """Find the links of a run, and return the programs that are not followed."""
        left = [port for execution in run.executions for port in execution.ports()]
        followed: dict[_Call, _Body | str] = {}
        while left:
            call = self._by_output.get(left.pop())
            if call is None or call in followed:
                continue
            body = followed[call] = call.reason or _body_that_ran(call, run)
            if isinstance(body, _Body):
                left += [*call.inputs, *body.results]
        uses = Counter(body.program for body in followed.values() if isinstance(body, _Body))
        hidden: set[int] = set()
        for call, body in followed.items():
            if isinstance(body, _Body) and uses[body.program] > 1:
                body = f"its function is called {uses[body.program]} times in one run"
            if isinstance(body, _Body):
                links.update(zip(body.arguments, call.inputs, strict=False))
                links.update(zip(call.outputs, body.results, strict=False))
            else:
                found = PathEnd(call.name, call.type, body)
                run.unseen.update((port, found) for port in call.outputs)
                hidden.update(body.program for body in call.bodies)
        return self._with_inner(hidden)

    def _with_inner(self, programs: set[int]) -> set[int]:
        """Return the programs and all programs that they call."""
        found, size = set(programs), -1
        while size != len(found):
            size = len(found)
            for call in self._calls:
                if call.program in found:
                    found.update(body.program for body in call.bodies)
        return found


def _body_that_ran(call: _Call, run: Run) -> _Body | str:
    if len(call.bodies) == 1:
        return call.bodies[0]
    ran = [body for body in call.bodies if not run.made.isdisjoint(body.results)]
    return ran[0] if len(ran) == 1 else "which of its branches ran is not known"


def _ordered(executions: Iterable[Execution]) -> list[Execution]:
    """Sort executions so that each comes after those whose values it takes, otherwise by number."""
    numbered = {execution.order: execution for execution in executions}
    makers = {port: number for number, one in numbered.items() for port in one.outputs}
    sorter = TopologicalSorter(
        {
            number: [makers[port] for port in one.ports() if port in makers]
            for number, one in numbered.items()
        }
    )
    sorter.prepare()
    found: list[Execution] = []
    ready: list[int] = []
    while sorter.is_active():
        for number in sorter.get_ready():
            heapq.heappush(ready, number)
        number = heapq.heappop(ready)
        found.append(numbered[number])
        sorter.done(number)
    return found
