"""An exception may arrive at any line while `apply` is entered, runs or is left."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode

import amanda
from amanda_core.engine import stacks
from amanda_core.runtime.threads import THREAD
from amanda_core.testing.kit.interruption import count_lines, interrupt
from amanda_driver_torch.gradients.driver_nodes import call_keeping_saved
from amanda_driver_torch.interception.patches import PATCHES
from amanda_driver_torch.interception.transparent_wrappers import call_transparently
from amanda_driver_torch.threads import modes
from amanda_driver_torch.threads.state import STATE, call_opaquely, call_quietly

#: How many of the lines the fast test tries.
SAMPLE = 12
TORCH = str(Path(torch.__file__).parent)


class Counter(amanda.Tool):
    """Counts the forward and backward ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.add_inst_for_op(self.look)
        self.add_inst_for_op(self.look_back, backward=True)

    def look(self, context: amanda.OpContext) -> None:
        context.insert_before_op(lambda *_: self.seen.append("forward"))

    def look_back(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda *_: self.seen.append("backward"))


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def two_modes() -> Iterator[None]:
    with Mode(), Mode():
        yield


LINEAR, X = nn.Linear(4, 4), torch.ones(2, 4)
OPTIMIZER = torch.optim.SGD(LINEAR.parameters(), lr=0.0)


def program() -> None:
    LINEAR(X).relu().sum().backward()
    OPTIMIZER.step()


def used(tool: amanda.Tool) -> None:
    with amanda.apply(tool):
        program()


def nested(tool: amanda.Tool) -> None:
    with amanda.apply(Counter()), amanda.apply(tool):
        program()


def in_mode(tool: amanda.Tool) -> None:
    mode = Mode()
    with mode:
        used(tool)


def in_zones(tool: amanda.Tool) -> None:
    with amanda.zone("outer"), amanda.apply(tool), amanda.zone("inner"):
        program()


def in_all_threads(tool: amanda.Tool) -> None:
    def run() -> None:
        LINEAR(X)

    with amanda.apply(tool, threads="all"):
        program()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


def state() -> Any:
    """Return what `apply` may change, as it is now."""
    attributes = [
        (nn.Module, "__call__"),
        (torch.autograd.Function, "apply"),
        (torch._ops.OpOverload, "__call__"),
        (torch, "relu"),
        (torch.autograd.profiler.record_function, "__enter__"),
        (nn.functional, "has_torch_function"),
    ]
    return (
        [vars(owner).get(name) for owner, name in attributes],
        torch.utils.swap_tensors.__code__,
        torch.autograd.graph._engine_run_backward.__globals__["Variable"]._execution_engine,
        (dict(_global_optimizer_post_hooks), dict(_global_optimizer_pre_hooks)),
        (len(sys.meta_path), len(PATCHES._undo)),
        (torch.is_grad_enabled(), torch._C._len_torch_function_stack()),
        torch._C._is_torch_function_enabled(),
        (STATE.attachment, len(STATE.activations), STATE.quiet, STATE.opaque, STATE.backward),
        (list(STATE.suspended), len(STATE.transparent), STATE.recomputing),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        (THREAD.session, THREAD.control.enabled, len(THREAD.zones)),
        ([stack for stack in stacks._STACKS if not stack.session.closed], list(stacks._SHARED)),
    )


def check(use: Callable[[amanda.Tool], None], step: int, kind: type[BaseException]) -> None:
    warm = Counter()
    for _ in range(2):
        use(warm)
        used(expected := Counter())
    before = state()
    makes: list[Callable[[], Counter]] = [lambda: warm, Counter]
    for make in makes:
        lines = count_lines(lambda make=make: use(make()))  # type: ignore[misc]
        for at in range(1, lines + 1, step):
            tool = make()
            place = interrupt(lambda tool=tool: use(tool), at, kind)  # type: ignore[misc]
            if TORCH in place:  # Its own contexts can be interrupted, too, such as those of a step.
                torch.set_grad_enabled(True)
                while torch._C._len_torch_function_stack():  # Its modes are left in Python.
                    torch.overrides._pop_mode()  # type: ignore[no-untyped-call]
            used(later := Counter())
            assert later.seen == expected.seen, place
            assert state() == before, place


# In function mode torch's own code around each operator is Python, and does not survive all.
@pytest.mark.one_interceptor
@pytest.mark.parametrize("use", [used, nested, in_mode, in_zones, in_all_threads])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_an_exception_at_a_sample_of_all_lines(
    use: Callable[[amanda.Tool], None], kind: type[BaseException]
) -> None:
    used(Counter())
    check(use, count_lines(lambda: use(Counter())) // SAMPLE, kind)


@pytest.mark.exhaustive
@pytest.mark.parametrize("use", [used, nested, in_mode, in_zones, in_all_threads])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_an_exception_at_each_line(
    use: Callable[[amanda.Tool], None], kind: type[BaseException]
) -> None:
    check(use, 1, kind)


AROUND: dict[str, Callable[..., Any]] = {
    "call_without_modes": modes.call_without_modes,
    "call_in_users_modes": partial(modes.call_without_modes, modes.call_in_users_modes),
    "call_routine": lambda f: modes.call_without_modes(modes.call_routine, lambda _: f(), None),
    "call_hidden": partial(modes.call_hidden, ()),
    "call_with_gradients": partial(modes.call_with_gradients, False),
    "call_with_saved_hooks": partial(modes.call_with_saved_hooks, lambda t: t, lambda t: t),
    "call_keeping_saved": partial(call_keeping_saved, {1}),
    "call_quietly": call_quietly,
    "call_opaquely": call_opaquely,
    "call_transparently": partial(call_transparently, vars(torch.nn.functional)),
}


@pytest.mark.parametrize("around", AROUND)
def test_an_exception_at_each_line_around_the_drivers_own_work(around: str) -> None:
    def work() -> None:
        X.relu()

    def program() -> None:
        AROUND[around](work)

    with two_modes(), torch.profiler.profile(acc_events=True) as profile:
        before, lines = state(), count_lines(program)
        assert lines > 3
        for at in range(1, lines + 1):
            place = interrupt(program, at)
            assert state() == before, place
            X.sigmoid()
    profiled = [event.name for event in profile.events()]
    assert profiled.count("aten::sigmoid") == lines


@contextlib.contextmanager
def interrupted(file: str, function: str, after: int) -> Iterator[None]:
    """Raise KeyboardInterrupt in a function, after a number of its lines."""
    left = after

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        code = frame.f_code
        if code.co_name != function or file not in code.co_filename:
            return None
        left -= event == "line"
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


@pytest.mark.filterwarnings("error::amanda.AmandaWarning")
@pytest.mark.parametrize("place", [("backward", "_hook_leaf"), ("node_hooks", "_hook")])
def test_a_hook_on_a_leaf_that_ctrl_c_leaves_does_nothing_later(place: tuple[str, str]) -> None:
    weight = torch.ones(4, requires_grad=True)

    def program() -> None:
        weight.sin().sum().backward()  # type: ignore[no-untyped-call]

    # A graph that is kept keeps the node of the leaf, which later graphs share.
    kept, arrived = weight.view_as(weight), 0
    for after in range(99):
        try:
            with amanda.apply(Counter()), interrupted(*place, after):
                program()
        except KeyboardInterrupt:
            arrived += 1
        program()
    assert 5 < arrived < 99
    assert kept.grad_fn is not None


@pytest.mark.parametrize("undone", range(0, 240, 20))
def test_ctrl_c_while_the_patches_are_undone(undone: int) -> None:
    used(expected := Counter())
    before = state()
    applied = amanda.apply(Counter())
    applied.__enter__()
    program()
    with pytest.raises(KeyboardInterrupt), interrupted("patching", "_undo", undone):
        applied.__exit__(None, None, None)
    assert state() == before
    used(later := Counter())
    assert later.seen == expected.seen


# Python swallows one that arrives in a `__del__`, such as that of a zip file with metadata.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.one_interceptor  # Torch's own `no_grad`, which the other one uses, does not survive.
def test_an_exception_from_another_thread() -> None:
    """`PyThreadState_SetAsyncExc` raises at the next bytecode that looks for it."""
    used(expected := Counter())
    before = state()
    # No bytecode of the trace function may run after it, which would raise the exception there, at
    # a line where Python itself looks for none. So the end of its frame sets it, without Python.
    raise_in = ctypes.PYFUNCTYPE(None, ctypes.c_ulong, ctypes.py_object, ctypes.py_object)(
        ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
    )
    fire = partial(raise_in, threading.get_ident(), KeyboardInterrupt)
    arrived = 0
    # Torch's own contexts do not survive one, such as `no_grad` and that of a step of an optimizer.
    for at in range(99, count_lines(partial(used, Counter()), [TORCH]), 997):
        calls = 0
        fuses: list[weakref.ref[Mode]] = []

        def set_later(frame: Any, event: str, _: Any, at: int = at, fuses: Any = fuses) -> Any:
            nonlocal calls
            calls += event == "line" and TORCH not in frame.f_code.co_filename
            if calls == at:
                sys.settrace(None)
                calls += 1
                burning = Mode()
                fuses.append(weakref.ref(burning, fire))
                return None
            return set_later

        sys.settrace(set_later)
        try:
            used(Counter())
            for _ in range(9):
                pass  # One that is set in the last lines arrives here.
        except KeyboardInterrupt:
            arrived += 1
        sys.settrace(None)
        assert fuses[0]() is None
        # Where it arrives at the end of an `except`, Python takes what was handled there for one
        # that still is, and sets it as the context of each later exception.
        ctypes.pythonapi.PyErr_SetHandledException(None)
        used(later := Counter())
        assert later.seen == expected.seen, at
        assert state() == before, at
    assert arrived  # Not all are swallowed, see above.
