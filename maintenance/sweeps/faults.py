"""Provoke everything that can go wrong, and check that the framework is as before afterwards.

Framework-free; the frameworks are described in `frameworks`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import amanda
from amanda_core.errors import RoutineResultError, ThreadError, UnsupportedError

from .fingerprints import changed
from .frameworks import Framework
from .results import Failure, Part, versions
from .shipped import LOOKING


class Told(Exception):
    """An ordinary exception."""


ERRORS: tuple[type[BaseException], ...] = (Told, KeyboardInterrupt, SystemExit, MemoryError)


def nothing(*values: Any) -> None:
    """Change nothing."""


#: Creates a tool that calls a routine at one kind of point.
Point = Callable[[Callable[..., Any]], amanda.Tool]


def _analysis(backward: bool, late: bool) -> Point:
    def make(routine: Callable[..., Any]) -> amanda.Tool:
        tool = amanda.Tool()
        tool.add_inst_for_op(lambda _: routine(), backward, late)
        return tool

    return make


def _routine(method: str, *, backward: bool = False, late: bool = False) -> Point:
    def make(routine: Callable[..., Any]) -> amanda.Tool:
        tool = amanda.Tool()
        tool.add_inst_for_op(lambda context: getattr(context, method)(routine), backward, late)
        return tool

    return make


#: Point -> factory of the tool, and whether the point is in backward.
POINTS: dict[str, tuple[Point, bool]] = {
    "analysis before an op": (_analysis(False, False), False),
    "analysis after an op": (_analysis(False, True), False),
    "analysis before a backward op": (_analysis(True, False), True),
    "analysis after a backward op": (_analysis(True, True), True),
    "before an op": (_routine("insert_before_op"), False),
    "after an op": (_routine("insert_after_op"), False),
    "in the place of an op": (_routine("replace_op"), False),
    "at gradients of outputs": (_routine("insert_before_backward_op"), True),
    "at gradients of inputs": (_routine("insert_after_backward_op"), True),
    "in the place of a backward": (_routine("replace_backward_op"), True),
    "before a backward op": (_routine("insert_before_backward_op", backward=True), True),
    "after a backward op": (_routine("insert_after_backward_op", backward=True), True),
    "in the place of a backward op": (_routine("replace_backward_op", backward=True), True),
}
#: A routine that replaces something and returns nothing is an error of its own.
REPLACING = "in the place of"


def chosen(only: str | None, sample: int | None, seed: int) -> list[str]:
    """Return the names of the faults in `POINTS` and `FAULTS`, or a random sample of them."""
    every = [name for name in [*POINTS, *FAULTS] if only is None or only in name]
    if sample is not None and sample < len(every):
        every = random.Random(seed).sample(every, sample)
    return every


def sweep(framework: Framework, names: list[str], *, shipped: bool = False) -> Part:
    """Provoke these faults in one framework, with each of its settings.

    Args:
        framework: The framework.
        names: The faults.
        shipped: Whether the shipped tools that only look are applied, too.
    """
    part = Part("faults", versions=versions())
    part.totals["kinds of faults"] = len(POINTS) + len(FAULTS)
    part.counts[f"kinds of faults made in {framework.name}"] = len(names)
    for settings in framework.settings:
        os.environ.update(settings)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                name = " ".join([framework.name, *settings.values()])
                check = _Check(framework, part, name, shipped=shipped)
                for name in names:
                    if name in POINTS:
                        _raised(check, name)
                    else:
                        FAULTS[name](check)
        finally:
            for name in settings:
                del os.environ[name]
    return part


class _Check:
    """Compares the framework and the program's results with those at the start."""

    def __init__(self, framework: Framework, part: Part, name: str, *, shipped: bool) -> None:
        self.framework, self.part, self.name, self.shipped = framework, part, name, shipped
        self.program = framework.program()
        self.program()
        with amanda.apply(self.watching()):  # So that everything lazy is initialized.
            self.program()
        self.found = framework.fingerprint()
        self.result = self.program()
        self.ops = self.seen()

    def watching(self) -> amanda.Tool:
        """Return a tool that inserts routines everywhere, and needs the shipped ones."""

        def forward(context: amanda.OpContext) -> None:
            context.insert_before_op(nothing)
            context.insert_after_op(nothing)
            if self.framework.backward:
                context.insert_before_backward_op(nothing)
                context.insert_after_backward_op(nothing)

        tool = amanda.Tool()
        tool.add_inst_for_op(forward)
        if self.shipped:
            folder = Path(tempfile.gettempdir())
            tool.depends_on(*(make(folder) for name, make in LOOKING.items() if name != "dump"))
        return tool

    def seen(self) -> int:
        """Return the number of operators that a new tool sees."""
        count = itertools.count()
        tool = amanda.Tool()
        tool.add_inst_for_op(lambda c: c.insert_before_op(lambda *values: _ignore(next(count))))
        with amanda.apply(tool):
            self.program()
        return next(count)

    def all_is_well(self, case: str, how: str, *, complaint: str = "") -> None:
        """Check after a fault that nothing is left behind and that the program and tools still
        work.
        """
        self.part.cases[f"{self.name}: {case}"] += 1
        wrong = [complaint] if complaint else []
        wrong += [f"left: {n}" for n in changed(self.found, self.framework.fingerprint())]
        try:
            if self.program() != self.result:
                wrong.append("the program computes something else")
            if self.seen() != self.ops:
                wrong.append("a tool does not see the same operators")
        except BaseException as error:
            wrong.append(f"the program raises {error!r}")
        if wrong:
            self.part.failures.append(Failure(f"{self.name}: {case}", how, wrong[:8]))


def _ignore(_: int) -> None:
    """Return None, as the result of a routine."""


def _raised(check: _Check, name: str) -> None:
    """Raise at the first, second, ... call at one kind of point, as long as there is
    another call.
    """
    make, backward = POINTS[name]
    if backward and not check.framework.backward:
        return
    for error in ERRORS:
        for number in itertools.count():
            fault = _Fault(error, number)
            complaint = ""
            try:
                with amanda.apply(check.watching(), make(fault)):
                    check.program()
            except error:
                complaint = "" if fault.raised else f"{error.__name__} before it was raised"
            except UnsupportedError as refusal:
                check.part.left_out[f"{check.name}: {name}"] = str(refusal)
                return
            except Exception as other:
                # Ops of a graph run concurrently: one may raise while another returns nothing.
                both = name.startswith(REPLACING) and isinstance(other, RoutineResultError)
                if not both and (fault.raised or not name.startswith(REPLACING)):
                    complaint = f"raised {other!r} instead"
            else:
                complaint = "the exception was swallowed" if fault.raised else ""
            check.all_is_well(name, f"{error.__name__} at call {number}", complaint=complaint)
            if not fault.raised:
                if number == 0 and not name.startswith(REPLACING):
                    check.part.left_out[f"{check.name}: {name}"] = "never called"
                break


class _Fault:
    """A routine that raises at its n-th call."""

    def __init__(self, error: type[BaseException], number: int) -> None:
        self.error, self.left, self.raised = error, number, False

    def __call__(self, *values: Any) -> None:
        self.left -= 1
        if self.left == -1:
            self.raised = True
            raise self.error("told to")


def _generators(check: _Check) -> None:
    """Leave generators with an open `apply`: closed, collected, thrown into, exhausted, crossed."""

    def generator() -> Iterator[None]:
        with amanda.apply(check.watching()):
            check.program()
            yield
            check.program()

    def thrown() -> None:
        left = generator()
        next(left)
        try:
            left.throw(Told())  # type: ignore[attr-defined]
        except Told:
            return

    def crossed() -> None:
        first, second = generator(), generator()
        next(first)
        next(second)
        for rest in (first, second):
            for _ in rest:
                pass

    def collected() -> None:
        left = generator()
        next(left)
        del left
        gc.collect()

    def closed() -> None:
        left = generator()
        next(left)
        left.close()  # type: ignore[attr-defined]

    for way in (thrown, crossed, collected, closed):
        way()
        check.all_is_well("a generator left half-way", way.__name__)


def _in_thread(function: Callable[[], Any]) -> list[BaseException]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def _threads(check: _Check) -> None:
    """Enter `apply` in one thread and leave it in another, which is an error and nothing else."""
    applied = amanda.apply(check.watching())
    applied.__enter__()
    raised = _in_thread(lambda: applied.__exit__(None, None, None))
    complaint = "" if [type(error) for error in raised] == [ThreadError] else f"raised {raised}"
    applied.__exit__(None, None, None)
    check.all_is_well("left in another thread", "apply", complaint=complaint)
    handles: list[Any] = []
    _in_thread(lambda: handles.append(amanda.attach(check.watching())))
    gc.collect()
    check.all_is_well("a thread ends with tools applied", "attach")
    try:
        handles.pop().remove()
    except ThreadError:
        check.all_is_well("a thread ends with tools applied", "removed by another")


def _collected(check: _Check) -> None:
    """Check that sessions, tools and handles are garbage after they were removed."""
    for way in ("left", "raised"):
        tool = check.watching()
        handle = amanda.attach(tool)
        refs = [weakref.ref(thing) for thing in (tool, handle, handle.session)]
        try:
            check.program()
            if way == "raised":
                raise Told
        except Told:
            pass
        handle.remove()
        del tool, handle
        gc.collect()
        alive = [repr(ref()) for ref in refs if ref() is not None]
        check.all_is_well("garbage", way, complaint=f"still alive: {alive}" if alive else "")


def _interleaved(check: _Check) -> None:
    """Remove handles in every order, with the program in between."""
    for order in itertools.permutations(range(3)):
        handles = [amanda.attach(check.watching()) for _ in order]
        for index in order:
            check.program()
            handles[index].remove()
            handles[index].remove()
        check.all_is_well("handles out of order", f"{order}")


def _random_handles(check: _Check) -> None:
    """Attach and remove handles and enter and leave `apply` at random, nested and in generators."""
    for seed in range(8):
        chance = random.Random(seed)
        open_: list[Callable[[], Any]] = []
        for _ in range(12):
            if open_ and chance.random() < 0.45:
                open_.pop(chance.randrange(len(open_)))()
            elif chance.random() < 0.5:
                open_.append(amanda.attach(check.watching()).remove)
            else:
                left = _half_way(check)
                next(left)
                open_.append(functools.partial(next, left, None))
            check.program()
        while open_:
            open_.pop(chance.randrange(len(open_)))()
        check.all_is_well("handles at random", f"seed {seed}")


def _half_way(check: _Check) -> Iterator[None]:
    with amanda.apply(check.watching()):
        check.program()
        yield


def _dropped(check: _Check) -> None:
    """Drop what a program created while tools are applied, and after they were removed."""
    with amanda.apply(check.watching()):
        for _ in range(3):
            check.framework.program()()
            gc.collect()
        left = check.framework.program()
        left()
    left()
    del left
    gc.collect()
    check.all_is_well("programs that are dropped", "collected")


def _of_the_program(check: _Check) -> None:
    """Raise in the program itself, with tools applied once or nested."""
    for error, depth in itertools.product(ERRORS, (1, 2)):
        try:
            with amanda.apply(check.watching()):
                if depth == 2:
                    with amanda.apply(check.watching()):
                        check.program()
                        raise error
                check.program()
                raise error
        except error:
            pass
        check.all_is_well("an exception of the program", f"{error.__name__}, {depth} deep")


def _again(check: _Check) -> None:
    """Enter one `apply` again, also within itself."""
    applied = amanda.apply(check.watching())
    with applied:
        check.program()
    with applied, applied:
        check.program()
    check.all_is_well("applied again, and within itself", "apply")


FAULTS: dict[str, Callable[[_Check], None]] = {
    "generators": _generators,
    "threads": _threads,
    "garbage": _collected,
    "handles": _interleaved,
    "handles at random": _random_handles,
    "programs dropped": _dropped,
    "the program": _of_the_program,
    "again": _again,
}
