"""An exception may arrive at any line while `apply` is entered, runs or is left."""

from __future__ import annotations

import contextlib
import linecache
import logging
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import amanda
from amanda_core.engine import stacks
from amanda_core.runtime.threads import THREAD
from amanda_core.testing.kit.interruption import count_lines, interrupt
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import ToyDriver

#: How many of the lines the fast test tries.
SAMPLE = 100


class Counter(amanda.Tool):
    """Counts the forward and backward ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_before_op(lambda *_: self.seen.append("forward"))

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda *_: self.seen.append("backward"))


def program() -> None:
    weight = toy.parameter(2.0)
    with toy.scope("layer"):
        out = toy.relu(toy.mul(weight, toy.Value(3.0)))
    toy.backward(out)
    assert weight.grad == 3.0


def used(tool: amanda.Tool) -> None:
    with amanda.apply(tool):
        program()


def nested(tool: amanda.Tool) -> None:
    with amanda.apply(tool), amanda.disabled(), amanda.enabled(), amanda.apply(Counter()):
        program()


def attached(tool: amanda.Tool) -> None:
    handle = amanda.attach(tool)
    try:
        program()
        handle.remove()
    except BaseException:
        handle.remove()
        raise


def in_zones(tool: amanda.Tool) -> None:
    with amanda.zone("outer"), amanda.apply(tool), amanda.zone("inner"):
        program()


def in_all_threads(tool: amanda.Tool) -> None:
    with amanda.apply(tool, threads="all"):
        program()
        in_thread(program)
        with amanda.apply(Counter()):
            program()


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    try:
        thread.start()
        thread.join()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # It was not started.
            thread.join()  # Its backward program must not run after the tools are gone.
        raise


def entered_by_hand(tool: amanda.Tool) -> None:
    applied = amanda.apply(tool)
    applied.__enter__()
    try:
        program()
    finally:
        applied.__exit__(None, None, None)


@pytest.fixture(params=[used, nested, attached, entered_by_hand, in_zones, in_all_threads])
def use(request: pytest.FixtureRequest) -> Callable[[amanda.Tool], None]:
    return request.param  # type: ignore[no-any-return]


def check(driver: ToyDriver, use: Callable[[amanda.Tool], None], step: int) -> None:
    used(expected := Counter())
    originals = {name: getattr(owner, name) for owner, name in driver.replaced}
    warm = Counter()
    use(warm)
    makes: list[Callable[[], Counter]] = [lambda: warm, Counter]
    for make in makes:
        lines = count_lines(lambda make=make: use(make()))  # type: ignore[misc]
        for at in range(1, lines + 1, step):
            tool = make()
            place = interrupt(lambda tool=tool: use(tool), at)  # type: ignore[misc]
            toy.reset()  # Its own contexts can be interrupted, too.
            # Whatever is left is completed by the next `apply`, which is whole.
            used(later := Counter())
            assert later.seen == expected.seen, place
            for name, original in originals.items():
                assert getattr(toy, name) is original, place
            assert not driver.interception.attached, place
            assert THREAD.session is None, place
            assert THREAD.control.enabled, place
            assert not THREAD.zones, place
            assert not stacks._SHARED, place
            assert all(stack.session.closed for stack in stacks._STACKS), place


def test_an_exception_at_a_sample_of_all_lines(
    driver: ToyDriver, use: Callable[[amanda.Tool], None]
) -> None:
    used(warm := Counter())
    check(driver, use, max(1, count_lines(lambda: use(warm)) // SAMPLE * 2 + 1))


def test_a_lock_that_an_exception_kept_is_released_when_the_tools_leave(driver: ToyDriver) -> None:
    with amanda.apply(tool := Counter(), threads="all"):
        in_thread(program)
        # As after an exception between taking it for a routine and calling that.
        tool._amanda.turn.acquire()
    taken: list[bool] = []
    in_thread(lambda: taken.append(tool._amanda.turn.acquire(timeout=0)))
    assert taken == [True]


def test_what_a_bare_except_of_a_framework_takes_is_told_from_what_is_lost(tmp_path: Path) -> None:
    source = (
        "def inner():\n    pass\n"
        "def outer():\n    try:\n        inner()\n    except{}:\n        pass\n{}"
    )
    cases = product((("", True), (" BaseException", False)), ("", "    raise ValueError\n"))
    for (kinds, found), then in cases:
        (tmp_path / "frame.py").write_text(text := source.format(kinds, then))
        scope: dict[str, Any] = {"__name__": "frame"}
        exec(compile(text, str(tmp_path / "frame.py"), "exec"), scope)
        linecache.clearcache()
        taken = pytest.raises(AssertionError, match=r"(None|ValueError.*) after .* inner")
        with contextlib.nullcontext() if found else taken:
            assert "inner" in interrupt(partial(scope["outer"]), 3, may_be_handled=True)


@pytest.mark.exhaustive
def test_an_exception_at_each_line(driver: ToyDriver, use: Callable[[amanda.Tool], None]) -> None:
    check(driver, use, 1)


@pytest.mark.parametrize("line", range(1, 4))
def test_an_exception_at_the_first_lines_of_an_exit(driver: ToyDriver, line: int) -> None:
    found = toy.dispatch
    applied, switch = amanda.apply(Counter()), amanda.disabled()
    for extent in (applied, switch):
        extent.__enter__()
        assert interrupt(partial(extent.__exit__, None, None, None), line)
    used(later := Counter())
    assert later.seen
    assert toy.dispatch is found


def test_an_extent_inside_itself_is_left_as_often_as_it_was_entered(driver: ToyDriver) -> None:
    applied = amanda.apply(tool := Counter())
    with applied:
        with applied:
            pass
        used(Counter())
        tool.seen.clear()
        program()
        assert tool.seen
    tool.seen.clear()
    program()
    assert not tool.seen


def test_tools_end_once_although_their_end_is_interrupted(driver: ToyDriver) -> None:
    ends: list[str] = []

    def end() -> None:
        ends.append("begun")
        raise KeyboardInterrupt

    tool, other = Counter(), Counter()
    tool.add_inst_for_end(end)
    other.add_inst_for_end(lambda: ends.append("other"))
    with pytest.raises(KeyboardInterrupt), amanda.apply(tool, other):
        pass
    assert ends == ["begun", "other"]


def test_an_exception_while_a_thread_gets_the_tools(driver: ToyDriver) -> None:
    used(expected := Counter())
    dispatch, places = toy.dispatch, list[str]()
    at, lines = 1, 2
    while at < lines:
        with amanda.apply(tool := Counter(), threads="all"):
            if at == 1:
                in_thread(lambda: places.append(str(count_lines(program))))
                lines = int(places.pop())

            def work(at: int = at) -> None:
                places.append(interrupt(program, at))

            in_thread(work)
            tool.seen.clear()
            in_thread(program)
            assert tool.seen == expected.seen, places[-1]
            program()
        assert toy.dispatch is dispatch, places[-1]
        assert not driver.interception.attached, places[-1]
        assert not stacks._STACKS, places[-1]
        at += max(1, lines // SAMPLE)
    assert len(places) > SAMPLE // 2


def test_no_exception_between_a_block_and_its_exit() -> None:
    """Python looks for one after calls, and so not where it prepares the call of an exit."""
    lock = threading.Lock()
    program: dict[str, Any] = {"lock": lock}
    source = (
        "def of(x):\n    with lock:\n        if x:\n            return x, 1\n        return None\n"
        "def run():\n    of(0)\n    of(1)\n"
    )
    exec(compile(source, "a_program.py", "exec"), program)
    lines = count_lines(lambda: program["run"]())
    assert lines > 6
    for at in range(1, lines + 1):
        place = interrupt(lambda: program["run"](), at)
        assert not lock.locked(), place


def test_no_lock_of_pythons_own_stays_held() -> None:
    logger, handler = logging.Logger("interrupted"), logging.Handler()
    logger.addHandler(handler)
    at, condition = 1, threading.Condition()
    handler.emit = lambda record: None  # type: ignore[method-assign]

    def log() -> None:
        with condition:
            logger.warning(str(at))

    while interrupt(log, at):
        at += 1
    free: list[bool] = []

    def take() -> None:
        for lock in (handler.lock, condition):
            assert lock is not None
            free.append(lock.acquire(timeout=1))

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert free == [True, True]
