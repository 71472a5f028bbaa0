"""Cost of entering and leaving `apply`, and what remains of it afterwards."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter, process_time

import amanda

from .bench_models import Subject, small_program
from .bench_tools import INTERCEPTORS, KINDS, Nothing, applied, unavailable

__all__ = ["Entering", "after_leaving", "entering"]

NEVER, AGAIN, LEFT = "never applied", "never applied, again", "applied and left"


@dataclass(frozen=True)
class Entering:
    """Seconds that entering and leaving `apply` take.

    Attributes:
        first: Entering and leaving for the first time in this process.
        enter: Median of entering, from the second time on.
        leave: Median of leaving.
        times: Number of measurements.
    """

    first: float
    enter: float
    leave: float
    times: int


def entering(interceptor: str, times: int) -> Entering:
    """Measure entering and leaving, with one small training step in between."""
    start = perf_counter()
    with applied(interceptor, amanda.Tool())():
        pass
    first = perf_counter() - start
    program = small_program(training=True)
    extent = applied(interceptor, Nothing())
    enters, leaves = [], []
    for _ in range(times):
        before = perf_counter()
        with extent():
            entered = perf_counter()
            program()
            leaving = perf_counter()
        enters.append(entered - before)
        leaves.append(perf_counter() - leaving)
    return Entering(first, median(enters[1:]), median(leaves[1:]), times)


def after_leaving(subject: Subject, training: bool, rounds: int) -> dict[str, float]:
    """Compare processes in which tools were applied with one in which none ever was.

    The processes are forked from this one, so that even their addresses are the same, and run the
    program in turns. Call this before anything else has changed torch in this process.

    Returns:
        Ratios of median processor times to those of the process in which nothing was ever applied.
        One ratio is for a process in which every kind of tool was applied with every interceptor
        and left. The other is for a second process in which nothing was applied, and shows the
        noise. Empty if the system cannot fork.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return {}
    program = subject.program(training)

    def leave() -> None:
        missing = unavailable()
        for name in INTERCEPTORS:
            if name in missing:
                continue
            for make in KINDS.values():
                with applied(name, make(subject.counted))():
                    program()
                    program()

    before: dict[str, Callable[[], None] | None] = {NEVER: None, AGAIN: None, LEFT: leave}
    # Freeze, because the processes differ in how much garbage there is.
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    pipes: dict[str, Connection] = {}
    processes = []
    for name, action in before.items():
        pipes[name], end = context.Pipe()
        processes.append(context.Process(target=_serve, args=(end, program, action)))
        processes[-1].start()
        end.close()
    seconds: dict[str, list[float]] = {name: [] for name in before}
    names = list(before)
    try:
        for number in range(rounds):
            for name in names[number % 3 :] + names[: number % 3]:
                pipes[name].send(10)
                seconds[name].extend(pipes[name].recv())
    finally:
        for pipe, process in zip(pipes.values(), processes, strict=True):
            # Closing the pipe is not enough, because later forks hold copies of its ends.
            with suppress(OSError):
                pipe.send(0)
            process.join(10)
            process.kill()
    medians = {name: median(values) for name, values in seconds.items()}
    return {name: medians[name] / medians[NEVER] for name in (AGAIN, LEFT)}


def _serve(
    pipe: Connection, program: Callable[[], None], before: Callable[[], None] | None
) -> None:
    if before is not None:
        before()
    for _ in range(50):
        program()
    gc.collect()
    gc.disable()
    while runs := pipe.recv():
        program()
        seconds = []
        for _ in range(runs):
            start = process_time()
            program()
            seconds.append(process_time() - start)
        pipe.send(seconds)
        gc.collect()
