"""Write trust.md beside this file, and its summary docs/trust.md, from the results."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from maintenance.figures.summaries import LOGS, trust

from .model_list import MODELS
from .results import Failure, Part, merged, read
from .shipped import EDITING, LOOKING

LOG, PAGE = LOGS["trust"]

INTRODUCTION = """\
# Evidence that tools leave programs unchanged

A tool that changes nothing must not change a single bit of a program, and nothing may be left
behind, whatever fails. This page lists what was run to test this, how often, and what was
found. `python -m maintenance.sweeps report` writes it from the results of the sweep; do not edit
it. A part stays until it is run again, so it may be older than the sources of this repository.
"""

_TOGETHER = ", ".join(f"`{name}`" for name in LOOKING)
_ALONE = ", ".join(f"`{name}`" for name in EDITING)
#: What the parts under the shipped tools have in common.
_SHIPPED = f"""\
Tools that only look are applied together, and if a result differs, each alone: {_TOGETHER}.
Results are compared with the plain run byte for byte. Tools that edit are applied one by one,
with options that keep the values, and the program must end as without them: {_ALONE}."""

#: Part -> its heading, and a description.
PARTS = {
    "operators": (
        "Operators",
        """\
Each operator of PyTorch's own database
(`torch.testing._internal.common_methods_invocations.op_db`) runs on its own sample inputs:

- in float32, bfloat16, int64, complex64 and bool, if it supports them;
- in each of its forms: function, method, operator, in place, `out=`;
- with gradients and gradients of gradients, if it has them;
- on one thread.

Each program runs twice without tools, and these runs have to agree. Then it runs three times
under one `apply`: the first run analyses, the last one uses the caches. Both interceptors are
tested, with three routines at all six points of every op: one that returns None, one that
returns the same objects, and one that returns new copies of the same layout.

Outputs, arguments after the call, gradients, accumulated gradients, errors and random state
are compared byte for byte. Identity and aliasing of outputs and inputs, strides, offsets,
versions, views, leaves and backward nodes are compared, too, unless a copy takes their place
by definition.""",
    ),
    "models": (
        "Models",
        """\
Classes of `transformers`, built from small configurations with random weights. Each runs
forward, loss and backward, and generation if the class has it. The plain run is compared with
runs under tools at every op, as above. One more run uses a dispatch mode of torch, which
counts the operators below autograd: each must run inside an instrumented op, as often as in
the plain run.""",
    ),
    "programs": (
        "Programs",
        """\
Programs as users write them, which use other libraries and torch's own machinery. Each runs
in a process of its own, some in two, with both interceptors and under four tools: three that
change nothing, as above, and one that counts. Losses, gradients, parameters, buffers,
outputs, files and random states are compared with the plain program byte for byte. The counts
are compared with those that follow from the program's loops, and a fingerprint of torch from
before with one from after. Each also runs under the shipped tools, as in the parts below.""",
    ),
    "programs, tensorflow": (
        "Programs of TensorFlow and Keras",
        """\
Small programs of libraries that build on TensorFlow and Keras 3 or 2: under a tool that only
analyses, under one whose routines return None at every op, and under the shipped tools. Losses,
gradients, weights, predictions and random states are compared with the plain program byte for
byte, and a fingerprint of TensorFlow from before with one from after. TensorFlow's optimizer of
graphs and oneDNN are off, since they fuse ops, which rounds differently, except where a routine
stands between these.""",
    ),
    "random": (
        "Random programs",
        """\
Programs drawn from a seed, with three steps of training: shared weights, loops, branches on
values, writes in place and through views, mixed dtypes, autocast, parts without gradients,
and parts that are recomputed. Under tools that change nothing they equal the plain program to
the bit. Under random edits a run from the caches equals one that analyses again, and both
interceptors agree. The order of tools that edit different ops makes no difference.""",
    ),
    "long": (
        "Long runs",
        """\
Many steps of one training under one session, many sessions one after another, and many
threads at once, half of them under tools. The memory of the process, the numbers of objects
and contexts and the processor time of a step must not grow. The results of each thread must
be those of the same training alone.""",
    ),
    "faults": (
        "Faults",
        """\
Each fault is injected at each point where it can happen. Afterwards a fingerprint of the
framework is compared with one from before: every attribute and code object of its modules
that a driver might touch, stacks of modes, hooks, redirected pointers, and import hooks.""",
    ),
    "exceptions": (
        "Exceptions",
        """\
The other parts excuse some differences by named exceptions. Here each exception is removed
and its case run again. One that no case needs any more is reported as stale, because it could
hide a defect.""",
    ),
}

for _name, _what in {
    "operators": "Operators of PyTorch's database on their own sample inputs.",
    "models": "Classes of `transformers`, chosen at random, as in the part above.",
    "random": "Programs drawn from a seed, as in the part above.",
}.items():
    PARTS[f"{_name}, shipped"] = (
        f"{PARTS[_name][0]} under the shipped tools",
        f"{_what} Both interceptors.\n\n{_SHIPPED}",
    )

for _name, _what in {
    "operators": "With torch's deterministic algorithms. `torch.cuda.jiterator` calls no routine.",
    "models": "Parts of the list, each until its time was over.",
    "random": "Here, too, plain runs have to agree.",
}.items():
    PARTS[f"{_name}, cuda"] = (
        f"{PARTS[_name][0]} on CUDA",
        "As in the parts above, with all tensors on a GPU: routines that change nothing and the "
        f"shipped tools.\n{_what}",
    )

PARTS["long, shipped"] = (
    "Long runs under the shipped tools",
    "Many sessions one after another, each with new tools, one step of training and the results of "
    "the tools, and many threads at once, half of them under the tools that only look. What must "
    f"hold is as in the part above.\n\n{_SHIPPED}",
)
PARTS["faults, shipped"] = (
    "Faults under the shipped tools",
    "Faults as in the part above, while the shipped tools that only look are applied, without "
    "`dump`, which writes files.",
)

#: A row of a program, and one of what was refused.
_RUN = re.compile(r"^\| (.+) \| (\d+) \| (\d{4}-\d\d-\d\d, `\w+`) \|$", re.MULTILINE)
_REFUSED = re.compile(r"^- (.+) \(([\d,]+) times\)$", re.MULTILINE)
_SHARD = re.compile(r" --shard (\d+/\d+)")

#: Part -> heading of `Part.refused`, if it does not contain errors.
REFUSED = dict.fromkeys(
    ("programs", "programs, tensorflow"),
    "Run in another way, with a notice, or refused by a tool that edits",
)


def write(folder: Path) -> int:
    """Write the page from the JSON files in `folder`; return 1 if something is unexplained."""
    found = merged(read(path) for path in sorted(folder.rglob("*.json")))
    before = LOG.read_text() if LOG.exists() else ""
    LOG.write_text("\n".join(_page(found, before)).rstrip() + "\n")
    PAGE.write_text(trust(LOG.read_text()))
    sys.stderr.write(f"Written to {LOG} and {PAGE}\n")
    return int(any(part.unexplained for part in found.values()))


def _page(found: dict[str, Part], before: str) -> Iterator[str]:
    """Yield the page, with the parts of an earlier one that were not run again."""
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in before.splitlines()}
    sections = dict(part.partition("\n")[::2] for part in before.split("\n## ")[1:])
    yield INTRODUCTION
    yield "| part | comparisons | explained differences | unexplained |"
    yield "|---|---|---|---|"
    for name, (heading, _) in PARTS.items():
        part = found.get(name)
        if part is not None and part.runs:
            _add_earlier(part, sections.get(heading, ""))
        if part is None:
            yield rows.get(heading, f"| {heading} | not run | | |")
            continue
        explained = len(part.failures) - len(part.unexplained)
        yield f"| {heading} | {part.cases.total():,} | {explained} | {len(part.unexplained)} |"
    yield ""
    for name, (heading, what) in PARTS.items():
        if name in found:
            yield f"## {heading}\n\n{what}\n"
            yield from _part(found[name])
        elif heading in sections:
            yield f"## {heading}\n{sections[heading]}"


def _add_earlier(part: Part, section: str) -> None:
    """Add the programs of an earlier page that were not run again."""
    for name, times, run in _RUN.findall(section):
        if name not in part.runs:
            part.runs[name], part.cases[name] = run, int(times)
            for what, number in _REFUSED.findall(section):
                if what.startswith((f"{name}:", f"{name},")):
                    part.refused[what] = int(number.replace(",", ""))
            for line in section.splitlines():
                for case in re.findall(
                    re.escape(name) + ": the values of `\\w+` under copies", line
                ):
                    part.left_out[case] = line.removeprefix("- ").partition(": ")[0]


def _part(part: Part) -> Iterator[str]:
    yield f"Run on {', '.join(f'{name} {of}' for name, of in sorted(part.versions.items()))}."
    yield "Again with:\n\n```"
    options = _without_shards(part.options)
    if part.runs:
        options = sorted({option.partition(" --only ")[0] for option in options})
    yield from (f"python -m maintenance.sweeps {option}" for option in options)
    yield "```\n\n| what | how many |\n|---|---|"
    yield from (f"| {name}, in all | {number:,} |" for name, number in part.totals.items())
    compared = [name for name, count in part.cases.items() if count]
    yield f"| cases compared | {len(compared):,} |"
    if part.name.startswith("operators"):
        yield f"| operators among them | {len({name.split(' ')[0] for name in compared}):,} |"
    counts = dict(part.counts)
    if part.name.startswith("models"):
        counts |= {f"classes of {t}": len({*names} & {*compared}) for t, names in MODELS.items()}
    yield from (f"| {name} | {number:,} |" for name, number in sorted(counts.items()))
    yield ""
    if part.runs:
        yield "| program | comparisons | run on, at commit |\n|---|---|---|"
        for name in sorted(part.runs):
            yield f"| {name} | {part.cases[name] or 'none, see below'} | {part.runs[name]} |"
        yield "\nThe other figures are of those that were run last.\n"
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
