"""Write docs/trust.md from the results that are available, and say what is missing."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from .model_list import MODELS
from .results import Failure, Part, merged, read

PAGE = Path(__file__).resolve().parents[1] / "docs" / "trust.md"

INTRODUCTION = """\
# What the claim of trust rests on

Written by `python -m sweeps report` from the results of the sweep; not edited by hand. A tool
that changes nothing must not change a bit, and nothing may be left behind, whatever fails. This
page says what was run to see whether that holds, how often, and what was found.
"""

#: Part -> its heading, and a description.
PARTS = {
    "operators": (
        "Operators",
        """\
Each operator of PyTorch's own database
(`torch.testing._internal.common_methods_invocations.op_db`) on its own sample inputs, in
float32, bfloat16, int64, complex64 and bool where it supports them, in each form that it has
(function, method, operator, in place, `out=`), with gradients and gradients of gradients where
it has them. One thread. Each program runs twice plain, which have to agree, and then three
times under one `apply` (the first analyses, the last runs from the caches), with both
interceptors and three routines at all six points of every op: one that returns None, one that
returns the same objects, one that returns fresh copies of the same layout. Compared byte for
byte: outputs, arguments after the call, gradients, accumulated gradients, errors, random state;
and, except where a copy has by definition come in their place: identity and aliasing of outputs
and inputs, strides, offsets, versions, views, leaves, backward nodes.""",
    ),
    "models": (
        "Models",
        """\
Classes of `transformers`, built from small configurations with random weights: forward, loss,
backward, and generation where the class has it; plain against instrumented at every op, as
above. Then once more under a dispatch mode of torch's, which counts the operators below autograd:
each must run inside some instrumented op, as often as in the plain run.""",
    ),
    "programs": (
        "Programs",
        """\
Programs as users write them, of other libraries and of torch's own machinery, each in a process
of its own (some in two), with both interceptors and under four tools: three that change nothing,
as above, and one that counts. Compared byte for byte with the plain program are all losses,
gradients, parameters, buffers, outputs and files that it notes, and the random states; the counts
with those that follow from the program's loops; and a fingerprint of torch, taken before and
after.""",
    ),
    "random": (
        "Random programs",
        """\
Programs drawn from a seed: shared weights, loops, branches on values, writing in place and through
views, mixed dtypes, autocast, parts without gradients, parts that are recomputed; three steps of
training. Under tools that change nothing they equal the plain program to the bit; under random
edits a run from the caches equals one that analyses anew, both interceptors equal one another, and
the order of tools that edit different ops does not matter.""",
    ),
    "long": (
        "Long runs",
        """\
Many steps of one training under one session, many sessions one after another, and many threads at
once, half of them under tools. The memory of the process, the number of objects and of contexts
must stay, and so must the processor time of a step; the results of each thread must be those of
the same training alone.""",
    ),
    "faults": (
        "Faults",
        """\
Each fault is made on purpose at each point where it can happen, and afterwards a fingerprint of
the framework is compared with the one taken before: every attribute and code object of its
modules that a driver might touch, stacks of modes, hooks, redirected pointers, import hooks.""",
    ),
    "exceptions": (
        "Exceptions",
        """\
Each exception that the other parts make is tried without: one that nothing needs any more would
be a place to hide, and is named as stale.""",
    ),
}

_SHARD = re.compile(r" --shard (\d+/\d+)")

#: Part -> heading of `Part.refused`, if it does not contain errors.
REFUSED = {"programs": "Run in another way, with a named notice"}


def write(folder: Path) -> int:
    """Write the page from the JSON files in `folder`; return 1 if something is unexplained."""
    found = merged(read(path) for path in sorted(folder.glob("*.json")))
    PAGE.write_text("\n".join(_page(found)).rstrip() + "\n")
    sys.stderr.write(f"Written to {PAGE}\n")
    return int(any(part.unexplained for part in found.values()))


def _page(found: dict[str, Part]) -> Iterator[str]:
    yield INTRODUCTION
    yield "| part | comparisons | explained differences | unexplained |"
    yield "|---|---|---|---|"
    for name, (heading, _) in PARTS.items():
        part = found.get(name)
        if part is None:
            yield f"| {heading} | not run | | |"
            continue
        explained = len(part.failures) - len(part.unexplained)
        yield f"| {heading} | {part.cases.total():,} | {explained} | {len(part.unexplained)} |"
    yield ""
    for name, (heading, what) in PARTS.items():
        if name in found:
            yield f"## {heading}\n\n{what}\n"
            yield from _part(found[name])


def _part(part: Part) -> Iterator[str]:
    yield f"Run on {', '.join(f'{name} {of}' for name, of in sorted(part.versions.items()))}."
    yield "Again with:\n\n```"
    yield from (f"python -m sweeps {option}" for option in _without_shards(part.options))
    yield "```\n\n| what | how many |\n|---|---|"
    yield from (f"| {name}, in all | {number:,} |" for name, number in part.totals.items())
    compared = [name for name, count in part.cases.items() if count]
    yield f"| cases compared | {len(compared):,} |"
    if part.name == "operators":
        yield f"| operators among them | {len({name.split(' ')[0] for name in compared}):,} |"
    counts = dict(part.counts)
    if part.name == "models":
        counts |= {f"classes of {t}": len({*names} & {*compared}) for t, names in MODELS.items()}
    yield from (f"| {name} | {number:,} |" for name, number in sorted(counts.items()))
    yield ""
    if part.figures:
        yield "### Figures\n"
        yield from (f"- {case}: {figure}" for case, figure in part.figures.items())
        yield ""
    if part.unexplained:
        yield "### Unexplained\n"
        for failure in part.unexplained:
            facts = ", ".join(failure.what[:4])
            yield f"- {failure.case} ({failure.how}; {failure.times} times): {facts}"
        yield ""
    if part.failures:
        yield from _explained(part.failures)
    if part.refused:
        yield f"### {REFUSED.get(part.name, 'Refused with a named error')}\n"
        if part.name == "operators":
            yield "The other points of these ops are compared.\n"
        yield from (f"- {what} ({times:,} times)" for what, times in sorted(part.refused.items()))
        yield ""
    if part.left_out:
        yield "### Not compared\n"
        reasons = defaultdict(list)
        for case, reason in sorted(part.left_out.items()):
            reasons[reason.splitlines()[0]].append(case)
        yield from (f"- {reason}: {', '.join(cases)}" for reason, cases in reasons.items())
        yield ""


def _without_shards(options: list[str]) -> list[str]:
    """Return the options that were requested; a complete set of shards becomes one option."""
    found: dict[str, set[str]] = defaultdict(set)
    for option in options:
        whole = _SHARD.sub("", option)
        shards = _SHARD.search(option)
        found[whole].add(shards[1] if shards else "0/1")
    return [
        option
        for whole, shards in found.items()
        for option in (
            [whole]
            if len(shards) == int(next(iter(shards)).rpartition("/")[2])
            else [f"{whole} --shard {shard}" for shard in sorted(shards)]
        )
    ]


def _explained(failures: list[Failure]) -> Iterator[str]:
    reasons = defaultdict(set)
    for failure in failures:
        if failure.reason:
            reasons[failure.reason].add(failure.case)
    if reasons:
        yield "### Differences that are explained\n"
        for reason, cases in sorted(reasons.items()):
            yield f"- {reason}: {', '.join(sorted(cases))}"
        yield ""
