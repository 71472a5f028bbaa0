"""Compiled callables under tools: their own compiled code, apart from that without tools.

Owns the callback of Dynamo that stands for a callable's own while tools are applied, the choice
between a woven graph and eager execution for each frame, and what is compiled for which tools.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from torch import fx, nn

from amanda_core.driver_kit import FRAMES, FRAMEWORK, Activation, Known, Session, Sites, WeakGroup
from amanda_core.interface import Site
from amanda_driver_torch.compiled.backward_operators import watching_leaves
from amanda_driver_torch.compiled.call_sites import (
    Places,
    call_recording,
    called_of,
    forget_calls,
    watch_tracing,
)
from amanda_driver_torch.compiled.choice import AnalysisFailed, CannotWeave
from amanda_driver_torch.compiled.graph import Weaving
from amanda_driver_torch.compiled.graph_tools import GraphTools
from amanda_driver_torch.compiled.graph_weights import Leaves
from amanda_driver_torch.compiled.host import Host, Row
from amanda_driver_torch.compiled.kernels import compile_with_kernels
from amanda_driver_torch.compiled.operators import Woven
from amanda_driver_torch.compiled.refusals import not_exported
from amanda_driver_torch.compiled.shared_code import SharedCode, copied, is_region, scope_number
from amanda_driver_torch.identity.frames import BOUNDARY, FORWARDS, is_own
from amanda_driver_torch.threads.state import STATE, call_quietly
from amanda_driver_torch.torch_internals import dynamo
from amanda_driver_torch.torch_internals.dynamo_guards import bound_code, guard_scope, guard_served
from amanda_driver_torch.torch_internals.entry_points import count_frame

__all__ = ["CompiledCode"]

_LIMIT = (
    "torch's limit of compilations is reached (torch._dynamo.config.recompile_limit, or "
    "accumulated_recompile_limit for all modules, for each of which tools need code of its own)"
)
_NOT_RECORDED = "a replay would leave out the routines; it keeps those marked with amanda.staged"


class CompiledCode:
    """The code that was compiled under the tools of one store; it resumes with their contexts.

    Attributes:
        session: The running session.
        host: The routines on the host.
        gaps: Names of frames that ran eagerly -> why.
        shared: Region of a backend, id of code -> what was compiled of it for several places.
    """

    session: Session

    def __init__(self) -> None:
        self.host = Host()
        self.gaps: dict[str, str] = {}
        self._tools: GraphTools | None = None
        self._woven: Known[bool] = Known()
        self._enter: Callable[[nn.Module, Activation | None], Any] | None = None
        self._callbacks: weakref.WeakKeyDictionary[Any, dict[int, _Callback]] = (
            weakref.WeakKeyDictionary()
        )
        self.shared: dict[tuple[int, int], list[SharedCode]] = {}
        # Compiled code refers to its backend.
        self._backends: WeakGroup[_Backend] = WeakGroup()

    @property
    def tools(self) -> GraphTools:
        """The parts of the running session that graphs are analysed with."""
        assert self._tools is not None
        return self._tools

    def begin(
        self,
        session: Session,
        sites: Sites[Site],
        constant: Callable[[Any], Any],
        enter: Callable[[nn.Module, Activation | None], Any],
        replace: Callable[[Any, str, Any], None],
    ) -> None:
        """Serve a session from now on.

        Args:
            session: The session.
            sites: Names operators.
            constant: Returns a value that is the same in every execution of its op, else None.
            enter: Returns the scope of a module called in an activation.
            replace: Replaces an attribute while any session is attached.
        """
        watch_tracing(replace)
        self.session = self.host.session = session
        self._enter = enter
        self._tools = GraphTools(session, self.host, sites, constant, self.gaps, self._woven)

    def end(self) -> None:
        """Serve no session any more."""
        self._tools = self._enter = None

    def callback(self, chosen: Any) -> Any:
        """Return the callback for the applied tools that stands for a callable's own.

        Args:
            chosen: The callable's own, according to the user's stance.

        Returns:
            None if the callable must run eagerly.
        """
        original = dynamo.beneath_stance(chosen)
        backend = dynamo.users_backend(original)
        if backend is None:
            return None
        known = self._callbacks.setdefault(original, {})
        epoch = self.session.epoch
        if epoch not in known:
            known[epoch] = _Callback(self, original, self._backend(backend, epoch))
        found = known[epoch]
        if dynamo.set_recompile_region is not None:
            dynamo.set_recompile_region(found.backend.region)
        return found if chosen is original else dynamo.failing(chosen, found, found.backend)

    def _backend(self, users: Callable[..., Any], epoch: int) -> _Backend:
        """Return the backend for an epoch; the same one for equal backends, which share code."""
        itself = dynamo.backend_itself(users)
        for known in self._backends:
            if known.epoch == epoch and dynamo.backend_itself(known.users) == itself:
                return known
        found = _Backend(weakref.ref(self), users, epoch)
        self._backends.add(found)
        return found

    def weave(
        self,
        gm: fx.GraphModule,
        leaves: Leaves,
        is_broken: bool,
        take_row: Callable[[Sequence[Woven]], Row | None] | None,
    ) -> tuple[fx.GraphModule, Sequence[Woven]]:
        """Weave the applied tools into a graph, as `graph.Weaving` does."""
        assert self._enter is not None
        # A program that is exported has no calls that a tool could count.
        counts = self.session.needs_calls and not self.tools.exports
        is_outermost = counts and not STATE.activations
        if is_outermost and any(called_of(node).modules for node in gm.graph.nodes):
            raise CannotWeave("a tool counts calls of outermost modules, which the graph holds")
        sites, frame = self.tools.sites, _outside()
        outer = sites.walk(frame, FRAMES)
        outer = outer[1:] if outer and outer[0][0].kind == FRAMEWORK else outer
        places = Places(sites, STATE.activations, self._enter, outer, sites.source(frame))
        return Weaving(gm, self.tools, places, leaves, is_broken, take_row).weave()

    def compile(
        self, backend: _Backend, graph: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Let a user's backend compile a graph."""
        tools = self.tools
        if not tools.kernels:
            compiled: Callable[..., Any] = backend.users(graph, inputs)
            return compiled
        more = tools.nodes, backend.code.co_qualname, backend.made, self.gaps
        return compile_with_kernels(self.host, backend.users, graph, inputs, *more)

    def note_eager(self, code: CodeType, reason: str) -> None:
        """Report that frames with this code run eagerly.

        Raises:
            UnsupportedError: They cannot, since a program is exported.
        """
        if self.tools.exports:
            raise not_exported(reason) from None
        name = code.co_qualname
        self.gaps.setdefault(f"compiled callable {name}", f"it runs eagerly: {reason}")
        self.session.warn_once(
            f"The compiled callable {name} runs eagerly while tools are applied: {reason}."
        )


def _outside() -> Any:
    """Return the innermost frame outside of Dynamo."""
    frame = sys._getframe(1)
    while frame.f_back is not None and id(frame.f_code) not in BOUNDARY:
        if not (is_own(frame.f_code) or dynamo.is_dynamos(frame.f_globals)):
            break
        frame = frame.f_back
    return frame


class _Callback:
    """A callback of Dynamo for one callable and one epoch.

    Attributes:
        backend: Its backend.
    """

    def __init__(self, owner: CompiledCode, original: Any, backend: _Backend) -> None:
        self.backend = backend
        self._owner = weakref.ref(owner)
        self._skipped: dict[int, tuple[CodeType, dynamo.ConvertFrameReturn]] = {}
        self._compile = dynamo.with_backend(original, backend, self)

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> dynamo.ConvertFrameReturn:
        code, owner, attachment = frame.f_code, self._owner(), STATE.attachment
        if is_own(code) and id(code) not in FORWARDS:
            return dynamo.skipped(below=id(code) not in BOUNDARY)
        if (
            owner is None
            or attachment is None
            or not attachment.watching()
            or attachment.session.epoch != self.backend.epoch
        ):
            return dynamo.skipped(below=True)
        if id(code) in self.backend.eager:
            return self._run_eagerly(code)
        if id(code) in self._skipped:
            return self._skipped[id(code)][1]
        before = self.backend.failure
        self.backend.failure = None
        self.backend.code = code
        try:
            for shared in owner.shared.get((self.backend.region, id(code)), ()):
                if adopted := call_quietly(self.backend.adopt, owner, shared, frame):
                    found: dynamo.ConvertFrameReturn = adopted
                    return found
            # Dynamo runs some operators itself, such as `weight.real`.
            is_shared = owner.tools.shares(self.backend.users) and is_region(frame)
            given = frame, cache_entry, frame_state, scope_number(), is_shared
            compiling = dynamo.compile_apart, self._compile, *given
            result: dynamo.ConvertFrameReturn = call_recording(call_quietly, *compiling)
            new = self.backend.new
            if new is not None and result.guarded_code is not None:
                new.end(code, result)
                owner.shared.setdefault((self.backend.region, id(code)), []).append(new)
        except BaseException as error:
            failure: Exception | None = self.backend.failure
            if dynamo.hits_total_limit(error):
                failure = CannotWeave(_LIMIT)
            if isinstance(failure, AnalysisFailed):
                raise failure.error from None
            if failure is None:
                raise
            self.backend.eager[id(code)] = code
            # FX adds lines about the node that it runs.
            owner.note_eager(code, str(failure).partition("\n")[0])
            return self._run_eagerly(code)
        finally:
            self.backend.failure, self.backend.new = before, None
        if result.guarded_code is None:
            if dynamo.hits_limit(result):
                owner.note_eager(code, _LIMIT)
                STATE.not_compiled[id(code)] = code
            # Without tools the code may well be compiled. If not, as torch's own around the calls
            # of graphs, Dynamo need not ask again at each call.
            if not dynamo.is_never_compiled(code):
                result.apply_to_code = False
                self._skipped[id(code)] = code, result
        return result

    def _run_eagerly(self, code: CodeType) -> dynamo.ConvertFrameReturn:
        STATE.not_compiled[id(code)] = code
        # A callable with `fullgraph=True` must have compiled at least one frame.
        count_frame(dynamo.set_frame_count)
        return dynamo.skipped(below=True)


class _Backend:
    """A user's backend, called with woven graphs.

    Attributes:
        users: The user's.
        epoch: That of the tools.
        region: The number of its region, for torch's limit of compilations.
        eager: id -> code of the frames that run eagerly; Dynamo makes code that cannot be hashed.
        failure: Why the last graph could not be woven.
        code: That of the frame that is compiled.
        new: The code that is compiled, if several places may share it.
        made: What identifies graphs whose kernels are shown -> how many there were.
    """

    code: CodeType

    def __init__(
        self, owner: weakref.ref[CompiledCode], users: Callable[..., Any], epoch: int
    ) -> None:
        self._owner, self.users, self.epoch = owner, users, epoch
        self.region = dynamo.new_recompile_region()
        self.eager: dict[int, CodeType] = {}
        self._leaves: dict[int, tuple[CodeType, Leaves]] = {}
        self.failure: Exception | None = None
        self.new: SharedCode | None = None
        self.made: Counter[Any] = Counter()
        self.__name__ = getattr(users, "__name__", type(users).__name__)

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        owner = self._owner()
        assert owner is not None
        tools, quiet = owner.tools, STATE.quiet
        woven: Sequence[Woven] | None = None
        try:
            STATE.quiet = quiet + 1
            # The program's hooks, such as those of checkpointing, are for its own operators.
            with dynamo.without_saved_tensors_hooks():
                leaves, bound = self._leaves_of_code(), bound_code()
                known = len(leaves.found)
                kept = None if bound.is_closed else copied(gm)
                if kept is None:
                    bound.close()

                def take_row(found: Sequence[Woven]) -> Row | None:
                    if kept is not None and len(leaves.found) == known:
                        frame, rows = bound.served_frame(), owner.host.rows
                        self.new = SharedCode(frame, kept, self.epoch, rows)
                        if self.new.begin(found):
                            guard_served(self.new.serves)
                            return self.new.first if found else None
                        self.new = None
                    bound.close()
                    # The same code may run in several modules, in which its operators are others.
                    guard_scope(scope_number())
                    return None

                tools.choose(self.users, inputs)
                graph, woven = owner.weave(gm, leaves, dynamo.begins_at_break(self.code), take_row)
            for one in (gm, graph):
                forget_calls(one)
            with contextlib.ExitStack() as stack:
                if woven:
                    stack.enter_context(dynamo.uncached())
                on_host = any(node.on_host for node in woven)
                if on_host and stack.enter_context(dynamo.for_routines_on_host(self.users)):
                    owner.gaps["CUDA graphs of compiled callables"] = _NOT_RECORDED
                shared = self.new
                if shared is not None and woven:
                    given = [*inputs, *shared.first.given]
                    compiled = dynamo.quiet_code(owner.compile(self, graph, given))
                    compiled = dynamo.quiet_code(shared.in_row(compiled))
                else:
                    compiled = dynamo.quiet_code(owner.compile(self, graph, inputs))
                if tools.accumulates(inputs):
                    place = (lambda: 0) if shared is None else shared.place
                    compiled = dynamo.quiet_code(watching_leaves(compiled, place))
                return compiled
        except (CannotWeave, AnalysisFailed) as error:
            self.failure = error
            raise
        except Exception as error:
            # Without plans it is the program's own graph.
            if woven or woven is None:
                first = str(error).partition("\n")[0]
                self.failure = CannotWeave(f"the backend fails on the woven graph: {first}")
            raise
        finally:
            STATE.quiet = quiet

    def _leaves_of_code(self) -> Leaves:
        return self._leaves.setdefault(id(self.code), (self.code, Leaves()))[1]

    def adopt(self, owner: CompiledCode, shared: SharedCode, frame: Any) -> Any:
        """Return what lets Dynamo run shared code for a frame; None if its plans differ."""

        def analyse(graph: fx.GraphModule) -> Sequence[Woven]:
            with dynamo.without_saved_tensors_hooks():
                leaves, is_broken = self._leaves_of_code(), dynamo.begins_at_break(self.code)
                owner.tools.choose(self.users, ())
                return owner.weave(graph, leaves, is_broken, None)[1]

        try:
            return shared.adopt(frame, analyse)
        except CannotWeave:
            return None  # It is compiled by itself, which says why.
        except AnalysisFailed as error:
            self.failure = error
            raise
