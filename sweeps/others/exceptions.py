"""Tests of others that a tool may make fail, each with its reason.

They look at what a tool is bound to change, such as how many objects there are or the frames of a
stack, or at what Amanda refuses by name. A line that no test needs any more is reported as stale.
"""

from __future__ import annotations

import dataclasses
import fnmatch


@dataclasses.dataclass(frozen=True)
class Excepted:
    """Failures that are explained.

    Attributes:
        suite: Pattern of the suite.
        test: Pattern of the test's id.
        reason: Why it fails, as docs/others.md prints it.
        tools: The tools under which it may.
    """

    suite: str
    test: str
    reason: str
    tools: tuple[str, ...] = ("watch", "none")

    def covers(self, suite: str, test: str, tool: str) -> bool:
        """Return whether it explains that a test fails under a tool."""
        return (
            tool in self.tools
            and fnmatch.fnmatchcase(suite, self.suite)
            and fnmatch.fnmatchcase(test, self.test)
        )


#: In the order in which they are tried.
EXCEPTED: tuple[Excepted, ...] = (
    *(
        Excepted(
            "tensorflow",
            f"backprop_test.py::BackpropTest::{test}",
            "Counts the tensors of the process, among which are those of a function that Amanda "
            "traced for the gradient of an op that reads one tensor twice",
            tools=("none",),
        )
        for test in (
            "testGradientTape",
            "testNestedGradients",
            "testPersistentGradientTapeRepeatedSource",
            "testPersistentNestedTape",
        )
    ),
    Excepted(
        "tensorflow",
        "cond_v2_test.py::CondV2Test::testLoweringDisabledInXLA",
        "Looks for StatelessIf in the graph that ran, where a conditional with a routine of a tool "
        "in its branches is an If",
        tools=("none",),
    ),
)


def reason(suite: str, test: str, tool: str) -> str:
    """Return why a test may fail under a tool; empty if nothing explains it."""
    for excepted in EXCEPTED:
        if excepted.covers(suite, test, tool):
            return excepted.reason
    return ""
