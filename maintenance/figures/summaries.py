"""The pages about the sweeps, which are summaries of their logs.

A log has everything and stands beside its program; its page has what a reader of the documentation
needs of it. Imports nothing of the programs, which import this.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["LOGS", "others", "renew", "trust"]

ROOT = Path(__file__).resolve().parents[2]
#: Name -> the log, and its page.
LOGS = {
    "trust": (ROOT / "maintenance/sweeps/trust.md", ROOT / "docs/trust.md"),
    "others": (ROOT / "maintenance/sweeps/others/others.md", ROOT / "docs/others.md"),
}
_TRUST = """\
# Evidence that tools leave programs unchanged

A tool that changes nothing must not change a single bit of a program, and nothing may be left
behind, whatever fails. Programs ran plain and under tools, and were compared byte for byte:
outputs, gradients, errors, random state, and what is alive afterwards.

{measured}
{table}

- **Operators** are those of PyTorch's own database, on its sample inputs, in each dtype and form,
  with gradients and gradients of gradients.
- **Models** are the classes of `transformers`, forward, loss, backward and generation.
- **Programs** are those that users write with other libraries: trainers, compilers, layouts.
- **Random programs** are drawn; **long runs** look for what grows; **faults** are exceptions at
  every place where a routine, a driver or the framework may raise one.
- **The shipped tools** look together, or edit one by one with options that keep the values.

A difference is *explained* where its reason is known, and lies in what the program asks for rather
than in a tool; [the log](../maintenance/sweeps/trust.md) names each. It also has what was refused,
what was not compared, the versions, and the commands to run everything again.
`nox -s sweep` writes this page; do not edit it. A part stays until it is run again, so it may be
older than the sources of this repository.
"""
_OTHERS = """\
# Other people's tests

The tests that the authors of frameworks and libraries wrote for their own code, run under tools
that change nothing. A test that passes without Amanda and fails under a tool, twice, is a failure.

{measured}
{table}

- `watch` has the four analysis routines and inserts nothing.
- `none` runs a routine that returns `None` before and after every operator, forward and backward.
- `shipped` is the tools of amanda-tools that only look, all at once.
- Under these, callables of `torch.compile` run eagerly. Those whose name ends with `-forward` have
  the routines of the forward program alone, so that what is compiled stays compiled.

Not every file was run under every tool. The tests are not part of this repository.

A *known reason* is named for each such test in [the log](../maintenance/sweeps/others/others.md):
most check what `torch.compile` compiled of a function that runs eagerly under tools, or count
tensors, frames, kernels or warnings of the process. The log also has the files and versions.
`nox -s others -- report` writes this page from results of `nox -s others -- SUITE --from FOLDER`;
do not edit it. The result of a file is kept until it is run again, so it may be older than the
sources of this repository.
"""
_MEASURED = re.compile(r"<!-- measured -->.*?<!-- end -->\n", re.DOTALL)


def trust(log: str) -> str:
    """Return the page of the sweep, given its log."""
    return _summary(_TRUST, log, log.partition("\n## ")[0])


def others(log: str) -> str:
    """Return the page of other people's tests, given its log."""
    return _summary(_OTHERS, log, log.partition("\n## Results\n")[2].partition("\n## ")[0])


def _summary(page: str, log: str, part: str) -> str:
    table = "\n".join(line for line in part.splitlines() if line.startswith("|"))
    measured = _MEASURED.search(log)
    return page.format(table=table, measured=measured[0] if measured else "")


def renew() -> None:
    """Write both pages."""
    for name, (log, page) in LOGS.items():
        page.write_text({"trust": trust, "others": others}[name](log.read_text("utf-8")), "utf-8")
