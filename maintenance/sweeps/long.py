"""Long runs: memory, contexts and time must not grow, and threads must not interfere.

A week of training has millions of steps. A leak of one byte per step becomes visible in the
thousands of steps here. Memory is that of the process as Linux reports it.
"""

# mypy: allow-untyped-calls
# torch does not annotate Tensor.backward and similar functions.

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import amanda

from .fingerprints import changed
from .frameworks import TORCH
from .identity import Identity, nothing
from .operators import INTERCEPTORS, VARIABLE, quiet
from .results import Failure, Part, versions
from .shipped import LOOKS, WAYS, applied

#: File in which Linux reports the memory of a process.
STATM = Path("/proc/self/statm")
#: Bytes by which memory may grow after the first fifth of a run, because allocators fluctuate.
GROWTH = 3 << 20
#: Number of Python objects by which a run may grow; one object left by each step is more.
OBJECTS = 1000
#: Factor by which the last fifth may be slower than the second, and the least number of steps in a
#: fifth for which this is checked.
SLOWER, LONG = 1.5, 1000
THREADS = 32


class Statistics(amanda.Tool):
    """A tool as users leave applied: norms of outputs and gradients, and a scaling that edits.

    Attributes:
        calls: Number of calls of each routine.
        last: Last value of each op and place; must not grow either.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.last: dict[tuple[int, str], float] = {}
        self.add_inst_for_op(self.analyse, require_outputs=True)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert routines at the outputs and gradients of linear layers, and edit those of relu."""
        if context.op_type == "linear":
            context.insert_after_op(self.note, op=context.op_id, place="output")
            context.insert_after_backward_op(self.note, op=context.op_id, place="gradient")
        elif context.op_type == "relu":
            context.insert_after_op(lambda value: value * 1.0)
            context.insert_before_backward_op(lambda grad: grad * 1.0)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        """Insert a counter before a backward op."""
        context.insert_before_backward_op(self.count)

    def note(self, *values: Any, op: int, place: str) -> None:
        """Record a norm."""
        self.calls[place] += 1
        self.last[op, place] = float(next(v for v in values if v is not None).norm())

    def count(self, *grads: Any) -> None:
        """Count a backward execution."""
        self.calls["backward"] += 1


def memory() -> int:
    """Return the memory of this process in bytes."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _model() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


def _step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(4, 8)), torch.randint(0, 4, (4,))).backward()
    optimizer.step()


class _Watch:
    """Measures memory and time five times in a run."""

    def __init__(self, part: Part, case: str, steps: int) -> None:
        self.part, self.case = part, case
        self.fifth = max(steps // 5, 1)
        self.memory: list[int] = []
        self.seconds: list[float] = []
        self.objects: list[int] = []
        self.start = time.process_time()

    def after(self, step: int) -> None:
        """Record the end of a step, from 1."""
        if step % self.fifth:
            return
        self.seconds.append(time.process_time() - self.start)
        self.memory.append(memory())
        self.objects.append(len(gc.get_objects()))
        self.start = time.process_time()

    def judge(self, wrong: list[str]) -> None:
        """Write the figures and report what grew."""
        part, case = self.part, self.case
        grown = self.memory[-1] - self.memory[0]
        micro = [seconds / self.fifth * 1e6 for seconds in self.seconds]
        part.cases[case] += 1
        part.figures[case] = (
            f"{len(micro) * self.fifth:,} times; memory after each fifth, MiB: "
            f"{', '.join(f'{m / 2**20:.1f}' for m in self.memory)}; objects of Python's: "
            f"{', '.join(f'{n:,}' for n in self.objects)}; microseconds of processor time each: "
            f"{', '.join(f'{m:,.0f}' for m in micro)}"
        )
        if grown > GROWTH:
            wrong.append(f"memory grew by {grown:,} bytes")
        if self.objects[-1] - self.objects[0] > OBJECTS:
            wrong.append(f"objects grew from {self.objects[0]} to {self.objects[-1]}")
        if self.fifth >= LONG and micro[-1] > SLOWER * micro[1]:
            wrong.append(f"a step takes {micro[-1]:.0f} us and took {micro[1]:.0f}")
        if wrong:
            part.failures.append(Failure(case, "", wrong))


def training(part: Part, interceptor: str, steps: int) -> None:
    """Run many steps of one training in one session."""
    model, tool = _model(), Statistics()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = _Watch(part, f"training, {interceptor}", steps)
    contexts, wrong = [], []
    with amanda.apply(tool, Identity(nothing)) as handle:
        assert handle.session is not None
        for step in range(1, steps + 1):
            _step(model, optimizer)
            watch.after(step)
            if step in (2, steps):
                contexts.append(len(list(handle.session.contexts())))
    if contexts[0] != contexts[1]:
        wrong.append(f"contexts grew from {contexts[0]} to {contexts[1]}")
    expected = {"output": 2 * steps, "gradient": 2 * steps}
    if any(tool.calls[place] != number for place, number in expected.items()):
        wrong.append(f"routines ran {dict(tool.calls)} times, not {expected}")
    watch.judge(wrong)
    part.figures[watch.case] += f"; contexts: {contexts[0]}, {contexts[1]}"


def sessions(part: Part, interceptor: str, steps: int) -> None:
    """Run many sessions, each with one training step."""

    def session(step: Callable[[], None]) -> list[str]:
        tool = Statistics()
        with amanda.apply(tool, Identity(nothing)):
            step()
        seen = tool.calls["output"]
        return [] if seen == 2 else [f"a session saw {seen} linear layers"]

    _sessions(part, f"sessions, {interceptor}", steps, session)


def shipped_sessions(way: str, part: Part, interceptor: str, steps: int) -> None:
    """Run many sessions under shipped tools, each with one training step and with results."""

    def session(step: Callable[[], None]) -> list[str]:
        with applied(way):
            step()
        return []

    _sessions(part, f"sessions, {way}, {interceptor}", steps, session)


def _sessions(
    part: Part, case: str, steps: int, session: Callable[[Callable[[], None]], list[str]]
) -> None:
    """Run many sessions; each returns what is wrong."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = _Watch(part, case, steps)

    def step() -> None:
        _step(model, optimizer)

    step()
    session(step)
    before, wrong = TORCH.fingerprint(), []
    for number in range(1, steps + 1):
        wrong = session(step)
        if wrong:
            break
        watch.after(number)
    wrong += [f"left: {name}" for name in changed(before, TORCH.fingerprint())]
    watch.judge(wrong)


def _of_a_thread(seed: int, steps: int) -> bytes:
    """Train with random numbers from `seed` only, and return the resulting weights."""
    chance = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance)

    first, second = drawn(8, 8).requires_grad_(), drawn(8, 3).requires_grad_()
    optimizer = torch.optim.SGD([first, second], lr=0.05, momentum=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        (torch.relu(drawn(4, 8) @ first) @ second).square().mean().backward()
        optimizer.step()
    return b"".join(t.detach().numpy().tobytes() for t in (first, second))


def threads(part: Part, interceptor: str, steps: int) -> None:
    """Train in many threads at once, half of them under tools, and compare with sequential runs."""

    def counting(train: Callable[[int], None], steps: int) -> list[str]:
        tool = _Products()
        with amanda.apply(tool, Identity(nothing)):
            train(steps)
        expected = 2 * steps
        return [] if tool.products == expected else [f"{tool.products} products, not {expected}"]

    _threads(part, f"threads, {interceptor}", steps, counting)


def shipped_threads(part: Part, interceptor: str, steps: int) -> None:
    """Train in many threads at once, half of them under the shipped tools that only look."""

    def looking(train: Callable[[int], None], steps: int) -> list[str]:
        with applied(LOOKS):
            train(steps)
        return []

    _threads(part, f"threads, {LOOKS}, {interceptor}", steps, looking)


def _threads(
    part: Part,
    case: str,
    steps: int,
    instrumented: Callable[[Callable[[int], None], int], list[str]],
) -> None:
    """Train in many threads, in half of them by `instrumented`, which returns what is wrong."""
    steps = max(steps // 20, 5)
    expected = [_of_a_thread(seed, steps) for seed in range(THREADS)]
    found: dict[int, bytes] = {}
    wrong: list[str] = []
    start = threading.Barrier(THREADS)

    def run(seed: int) -> None:
        try:
            start.wait()

            def train(steps: int) -> None:
                found[seed] = _of_a_thread(seed, steps)

            if seed % 2:
                train(steps)
            else:
                wrong.extend(f"thread {seed}: {what}" for what in instrumented(train, steps))
        except BaseException as error:
            wrong.append(f"thread {seed} raised {error!r}")

    before = TORCH.fingerprint()
    running = [threading.Thread(target=run, args=(seed,)) for seed in range(THREADS)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    wrong += [f"thread {seed} has other bits" for seed, b in found.items() if b != expected[seed]]
    wrong += [f"left: {name}" for name in changed(before, TORCH.fingerprint())]
    part.cases[case] += THREADS
    part.figures[case] = (
        f"{THREADS} threads at once, {steps:,} steps each, half of them under tools"
    )
    if wrong or len(found) != THREADS:
        part.failures.append(Failure(case, "", wrong[:8] or ["a thread has no result"]))


class _Products(amanda.Tool):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.op_type == "matmul":
            context.insert_before_op(self.count)

    def count(self, *values: Any) -> None:
        self.products += 1


RUNS: dict[str, Callable[[Part, str, int], None]] = {
    "training": training,
    "sessions": sessions,
    "threads": threads,
}
SHIPPED_RUNS: dict[str, Callable[[Part, str, int], None]] = {
    **{f"sessions, {way}": functools.partial(shipped_sessions, way) for way in WAYS},
    f"threads, {LOOKS}": shipped_threads,
}


def sweep(only: str | None, steps: int, *, shipped: bool = False) -> Part:
    """Run the long runs, each with both interceptors."""
    part = Part("long", versions=versions())
    if not STATM.exists():
        part.left_out["all"] = f"{STATM} is not here to tell of memory"
        return part
    with quiet():
        for name, run in (SHIPPED_RUNS if shipped else RUNS).items():
            for interceptor in INTERCEPTORS:
                os.environ[VARIABLE] = interceptor
                if only is None or only in f"{name}, {interceptor}":
                    run(part, interceptor, steps)
    return part
