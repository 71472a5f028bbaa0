"""Tools on a framework that they do not know: the program runs as without them.

The result of a tool says what it could not do.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import pytest

#: Runs in a process in which no framework can be imported: a tool may not guess one.
_PROGRAM = """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "tensorflow"):
            raise AssertionError(f"a tool took the framework for {name}")

sys.meta_path.insert(0, Refuse())
from amanda_core.plugins import discovery
from amanda_core.interface.facts import Facts
from amanda_core.testing import check_result, run_toy_program
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy import driver as toy_driver

class Fewest(Facts):
    def is_tensor(self, value):
        return isinstance(value, toy.Value)
    def dtype(self, tensor):
        return "float64"
    def shape(self, tensor):
        return ()

what = sys.argv[1]
lacking = {
    "compiled": {"ordered"},
    "forward only": {
        *("gradients", "aligned_gradients", "late_gradients", "replace_backward", "autodiff"),
    },
}
driver = toy_driver.ToyDriver(
    modules=(toy.__name__,),
    capabilities=toy_driver.CAPABILITIES - lacking.get(what, set()),
)
if what == "no facts":
    driver.facts = None
elif what == "fewest facts":
    driver.facts = Fewest()
elif what == "forward only":  # Its operators of the backward program have no contexts.
    toy_driver.ToyAttachment.watch = lambda *_: lambda run, gradients: run(gradients)
elif what in ("compiled", "followed", "named"):
    toy_driver.ToyAttachment.mode = "jit"
    if what != "compiled":
        Facts.follows_graphs = True
    if what == "named":
        kept = {}  # So that no other value gets the same number.
        Facts.symbol = lambda self, value: (toy.Value, id(kept.setdefault(id(value), value)))
discovery.register(driver, "toy", "amanda_core.testing.toy.driver")
plain, found = run_toy_program(steps=2), {}
needed = {
    "prune": {"sparsity": 0.5},
    "prune_tiles": {"sparsity": 0.5},
    "capture": {"ops": ["*"]},
    "rewrite": {"rules": ["conv_bn"]},
    "steer": {"edit": "scale", "ops": ["nothing"]},
}
for name, point in discovery.tools().items():
    tool = point.load()(**needed.get(name, {}))
    assert run_toy_program(tool, steps=2) == plain, name
    assert driver.detached, "the tools were under another driver"
    found[name] = check_result(tool.result()) if hasattr(tool, "result") else None
print(json.dumps(found))
"""

_NO_RULE = "none of the rules is for toy"
_NO_ARITHMETIC = "its driver provides no arithmetic, and its tensors are not NumPy's arrays"
_NO_RULES = "there are no rules for its operators"
_OF_PYTORCH = "only what PyTorch's autograd saves in eager mode can be evicted"
#: What is known of the driver -> tool -> what its result says.
_SAID: dict[str, dict[str, str]] = {
    "facts": {
        "quantize": f"not supported on toy/1.2.3/eager: {_NO_ARITHMETIC}",
        "rematerialize": f"not supported on toy/1.2.3/eager: {_OF_PYTORCH}",
        "effective_path": f"not supported on toy/1.2.3/eager: {_NO_RULES}",
        "rewrite": f"not supported on toy/1.2.3/eager: {_NO_RULE}",
        "sensitivity": f"was not measured: {_NO_ARITHMETIC}",
    },
    "no facts": dict.fromkeys(
        (
            *("memory", "flops", "summary", "sparsity", "nonfinite", "dump", "fingerprint"),
            *("graph", "effective_path"),
            *("capture", "inject_faults", "rematerialize", "replicas", "rewrite"),
        ),
        "not supported on toy/1.2.3/eager: its driver does not tell what tensors are",
    ),
    "fewest facts": {
        "quantize": f"not supported on toy/1.2.3/eager: {_NO_ARITHMETIC}",
        "rematerialize": f"not supported on toy/1.2.3/eager: {_OF_PYTORCH}",
        "effective_path": f"not supported on toy/1.2.3/eager: {_NO_RULES}",
        "rewrite": f"not supported on toy/1.2.3/eager: {_NO_RULE}",
        "memory": "not counted: its driver does not report where tensors lie in memory",
        "sparsity": "not measured: its driver does not read values",
        "dump": "its driver does not read values",
        **dict.fromkeys(
            ("fingerprint", "replicas"), "without a digest: its driver does not read values"
        ),
        "nonfinite": "NotReadableError",
    },
    "forward only": {
        "flops": "gradients are not counted on toy/1.2.3/eager",
        "quantize": f"not supported on toy/1.2.3/eager: {_NO_ARITHMETIC}",
        "rematerialize": f"not supported on toy/1.2.3/eager: {_OF_PYTORCH}",
        "effective_path": f"not supported on toy/1.2.3/eager: {_NO_RULES}",
        "rewrite": f"not supported on toy/1.2.3/eager: {_NO_RULE}",
    },
    "compiled": {
        "quantize": f"not supported on toy/1.2.3/jit: {_NO_ARITHMETIC}",
        "rematerialize": f"not supported on toy/1.2.3/jit: {_OF_PYTORCH}",
        **dict.fromkeys(
            ("memory", "latency"),
            "not supported on toy/1.2.3/jit: routines do not run there when their operator does",
        ),
        **dict.fromkeys(("fingerprint", "replicas"), "on toy/1.2.3/jit routines run in any order"),
        "graph": "not supported on toy/1.2.3/jit: its graphs cannot be read",
        "effective_path": f"not supported on toy/1.2.3/jit: {_NO_RULES}",
        "rewrite": f"not supported on toy/1.2.3/jit: {_NO_RULE}",
    },
}


@functools.cache
def results(driver: str) -> dict[str, Any]:
    """Return the results of all tools, after checking that the program is the same as
    without them.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, driver], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert {"trace", "memory", "latency", "graph", "effective_path"} <= set(found)
    return found


@pytest.mark.parametrize("driver", _SAID)
def test_the_program_runs_and_tools_say_what_they_miss(driver: str) -> None:
    texts = {tool: json.dumps(result) for tool, result in results(driver).items()}
    for tool, said in _SAID[driver].items():
        assert said in texts[tool], tool
    unsupported = {tool for tool, text in texts.items() if "not supported" in text}
    assert unsupported == {t for t, said in _SAID[driver].items() if "not supported" in said}


def test_tools_measure_a_framework_that_they_do_not_know() -> None:
    found = results("facts")
    # A number has 8 bytes.
    assert found["memory"]["peak"] % 8 == 0
    assert found["memory"]["peak"] > 0
    assert {tensor["dtype"] for tensor in found["dump"]["tensors"]} == {"float64"}
    assert found["nonfinite"]["checked"] > 0
    assert found["nonfinite"]["unchecked"] == {}
    assert found["sparsity"]["tensors"]
    (graph,) = found["graph"]["graphs"]
    assert graph["edges"]


@pytest.mark.parametrize("driver", ["followed", "named"])
def test_a_graph_is_read_where_the_driver_says_that_values_can_be_followed(driver: str) -> None:
    """The values of the toy framework are the same objects in all its modes."""

    def read(driver: str) -> list[Any]:
        (graph,) = results(driver)["graph"]["graphs"]
        assert graph["namespace"].startswith("toy/")
        ends = ("producer", "output", "consumer", "input")
        edges = [[edge[end] for end in ends] for edge in graph["edges"]]
        return [[node["name"] for node in graph["nodes"]], sorted(edges)]

    assert read(driver) == read("facts")
