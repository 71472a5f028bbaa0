"""Guards by which Dynamo decides which frames a piece of code for tools serves.

Owns the private names of Dynamo's guards. Importing this module imports torch's compiler.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch._dynamo.guards import DeletedGuardManagerWrapper, GuardBuilder, install_guard
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.types import ConvertFrameReturn

from amanda_driver_torch.torch_internals.extension import native

#: Objects and scope of the code that is being compiled for tools.
BOUND: ContextVar[Bound | None] = ContextVar("bound", default=None)


class Bound:
    """The objects and the scope to which guards bind a piece of compiled code.

    Code for tools is bound to modules and weights where code without tools is not, so only code
    that is bound to the same ones counts for the limit of recompilations. Dynamo counts code whose
    `id_matched_objs` are those of the frame; an instance stands there for a weak reference.

    Args:
        frame: The frame that is compiled.
        scope: The number of its scope.
    """

    def __init__(self, frame: Any, scope: int) -> None:
        self.scope, self.guards_scope = scope, False
        #: Whether guards for identity are installed at once. Otherwise the backend decides.
        self.is_closed = True
        #: Whether the code serves the frame that is compiled; None if guards decide alone.
        self.serves: Callable[[Any], bool] | None = None
        self.sources: dict[str, Any] = {}
        self._names: set[str] = set()
        self._found: dict[str, weakref.ref[Any]] = {}
        self._variables: Any = {"L": frame.f_locals, "G": frame.f_globals}

    def add(self, guard: Any) -> None:
        """Bind the code to the object of a guard."""
        self._names.add(guard.name)

    def served_frame(self) -> ServedFrame:
        """Return how the objects are read that differ between the frames that code serves."""
        return ServedFrame(list(self.sources), self._variables["L"], self._variables["G"])

    def close(self) -> None:
        """Let guards decide which objects the code serves."""
        if not self.is_closed:
            self.is_closed = True
            for source in self.sources.values():
                guard_identity(source)

    def hold(self) -> None:
        """Refer to the objects weakly from now on, and to the frame not at all."""
        for name in self._names:
            with contextlib.suppress(Exception):
                self._found[name] = weakref.ref(self.value(name))
        self._variables = None

    def value(self, name: str) -> Any:
        """Return what is at a place of the frame."""
        return eval(name, self._variables)

    def __call__(self) -> object:
        """Return None if this code counts for the frame that is being compiled, else an object."""
        other = BOUND.get()
        if self.serves is not None:
            return None if other is not None and self.serves(other._variables["L"]) else self
        if other is None or (self.guards_scope and self.scope != other.scope):
            return self
        try:
            same = all(found() is other.value(name) for name, found in self._found.items())
        except Exception:  # The frame has nothing at this place.
            same = False
        return None if same else self


def is_own(guard: Any) -> bool:
    """Return True for guards of `guard_identity` and `guard_scope`, which no program may drop."""
    is_identity = guard.guard_type == "ID_MATCH"
    return guard.guard_type in (_in_scope.__name__, _is_served.__name__) or (
        is_identity and isinstance(guard.value, (torch.nn.Module, torch.Tensor))
    )


def guard_identity(source: Any) -> None:
    """Let the code that is being compiled serve no other object at this place of the program."""
    guard, bound = source.make_guard(GuardBuilder.ID_MATCH), BOUND.get()
    if bound is not None and not bound.is_closed:
        bound.sources[guard.name] = source
        return
    install_guard(guard)
    if bound is not None:
        bound.add(guard)


def name_of(source: Any) -> str:
    """Return a place of the program as an expression of Dynamo's."""
    return str(source.make_guard(GuardBuilder.ID_MATCH).name)


def bound_code() -> Bound:
    """Return to which objects the code is bound that is being compiled."""
    bound = BOUND.get()
    assert bound is not None
    return bound


def guard_scope(number: int) -> None:
    """Let the code that is being compiled serve only in the scope with this number."""
    create = functools.partial(_in_scope, number)
    if (bound := BOUND.get()) is not None:
        bound.guards_scope = True
    install_guard(torch._guards.Guard(GlobalStateSource(), create))


def _in_scope(number: int, builder: Any, guard: Any) -> None:
    root = builder.guard_manager.root
    _guard_by(native.in_scope(number), f"___amanda_scope() == {number}", root)


def guard_served(serves: Callable[[Any], bool]) -> None:
    """Let a function of the local variables decide which frames the code serves."""
    bound_code().serves = serves
    create = functools.partial(_is_served, serves)
    install_guard(torch._guards.Guard(GlobalStateSource(), create))


def _is_served(serves: Callable[[Any], bool], builder: Any, guard: Any) -> None:
    _guard_by(serves, "___amanda_serves(L)", builder.guard_manager.root)


def _guard_by(function: Callable[[Any], bool], text: str, root: Any) -> None:
    # From PyTorch 2.11 on it takes the user's stack, too.
    stack = (None,) if "arg2" in root.add_lambda_guard.__doc__ else ()
    root.add_lambda_guard(function, [text], *stack)


class ServedFrame:
    """How to find the objects of a frame that differ between the frames that code serves.

    Args:
        names: The places of the objects, as Dynamo writes them.
        variables: The local variables of the frame that was compiled.
        namespace: Its globals.
    """

    def __init__(self, names: list[str], variables: Any, namespace: Any) -> None:
        self._read = compile(f"({''.join(f'{name},' for name in names)})", "<objects>", "eval")
        self._first, self._globals = variables, namespace
        self.objects()

    def serves(self, rows: dict[Any, Any], epoch: int, chosen: list[Any]) -> Callable[[Any], bool]:
        """Return a function that looks a frame up, given its local variables.

        Args:
            rows: Number of the scope, and the ids of the objects -> what is looked up.
            epoch: That of the tools; the code serves no others.
            chosen: Whose first element becomes what was found.
        """
        space = {"G": self._globals, "__builtins__": builtins}
        found: Callable[[Any], bool] = native.serving(self._read, space, rows, epoch, chosen)
        return found

    def objects(self, variables: Any = None) -> tuple[Any, ...]:
        """Return the objects of a frame with other local variables, or those of the first one."""
        variables = self._first if variables is None else variables
        found: tuple[Any, ...] = eval(self._read, {"L": variables, "G": self._globals})
        return found

    def hold(self) -> None:
        """Forget the first frame."""
        self._first = {}

    def is_accepted(self, result: ConvertFrameReturn, frame: Any) -> bool:
        """Return True if the guards of compiled code hold for a frame."""
        assert result.guarded_code is not None
        manager: Any = result.guarded_code.guard_manager
        return frame.f_globals is self._globals and bool(manager.check(frame.f_locals))

    def place(
        self,
        graph: torch.fx.GraphModule,
        frame: Any,
        put_modules: Callable[[torch.fx.Node, Callable[[str], Any]], None],
    ) -> None:
        """Put the values of a frame into a copy of the graph of the first one.

        Args:
            graph: The copy.
            frame: The frame.
            put_modules: Puts those of the modules in which a node was called, given what returns
                the object at a place.
        """
        variables = {"L": frame.f_locals, "G": self._globals}
        read = functools.lru_cache(None)(lambda name: eval(name, variables))
        for node in graph.graph.nodes:
            if (argument := node.meta.get("grapharg")) is not None:
                value = read(name_of(argument.source))
                node.meta["grapharg"] = _Argument(argument.source, value, argument.is_tensor)
            put_modules(node, read)

    @staticmethod
    def result_for(result: ConvertFrameReturn) -> ConvertFrameReturn:
        """Return what lets Dynamo run compiled code once for a frame that it serves from now on."""
        code: Any = result.guarded_code
        # Guards that never hold: for the next call those of the code itself are found.
        once = dataclasses.replace(code, guard_manager=DeletedGuardManagerWrapper("served once"))
        _guard_by(lambda variables: False, "served once", once.guard_manager.root)
        once.guard_manager.id_matched_objs["___amanda"] = lambda: _ALIVE
        return dataclasses.replace(result, guarded_code=once)


_ALIVE = object()


@dataclasses.dataclass(frozen=True)
class _Argument:
    """An argument of a graph in another frame than the one that Dynamo has traced."""

    source: Any
    example: Any
    is_tensor: bool
