"""The facts about an op in its context, in terms that all backends share."""

from __future__ import annotations

from typing import Any

import pytest

from amanda_core.engine.activation import apply
from amanda_core.engine.context import OpContext
from amanda_core.errors import StaleContextError
from amanda_core.interface.driver import DRIVER_API, CoverageGap, DriverInfo, Finding
from amanda_core.interface.namespace import Namespace, matches
from amanda_core.interface.vocabulary import OP_TYPES
from amanda_core.testing.kit.capabilities import CAPABILITIES
from amanda_core.testing.kit.rig import Rig


def _contexts(rig: Rig, name: str = "chain", runs: int = 1) -> list[OpContext]:
    found: list[OpContext] = []
    built = rig.build(name)
    with apply(rig.tool(found.append, *built.model.common_types)):
        for _ in range(runs):
            built.run()
    return found


def test_facts_of_an_op(rig: Rig) -> None:
    """Give a `Site` a type, a readable name and a namespace, and its context the operator."""
    raw: list[Any] = []
    ids: list[int] = []
    built = rig.build("chain")

    def analyse(context: OpContext) -> None:
        raw.append(context.get_op())
        ids.append(context.get_op_id())
        assert isinstance(context.op_type, str)
        assert context.op_type
        assert isinstance(context.name, str)
        assert context.name
        assert not context.is_backward()
        assert context.get_backward_op_id() is None

    with apply(rig.tool(analyse, *built.model.common_types)):
        built.run()
    assert len(raw) == len(set(ids)) == 3
    assert None not in raw
    assert all(isinstance(number, int) for number in ids)


def test_the_namespace_is_a_declared_one(rig: Rig) -> None:
    """Use a namespace ``framework/version/mode`` that matches `DriverInfo.namespaces`."""
    found = _contexts(rig)
    assert len(found) == 3
    for context in found:
        parsed = Namespace.parse(context.namespace)
        assert parsed.framework == rig.info.name
        assert any(matches(pattern, context.namespace) for pattern in rig.info.namespaces)
        assert rig.backend.mode in ("", parsed.mode)


def test_operators_have_common_words(rig: Rig) -> None:
    """Set context["type"] to the common type, by `amanda_prepare_context` or `DriverInfo`."""
    common_types = [context["type"] for context in _contexts(rig)]
    assert common_types == ["mul", "add", "relu"]
    for context in _contexts(rig):
        assert rig.info.vocabulary[context.op_type] == context["type"]
    unknown = {
        w for w in rig.info.vocabulary.values() if w.removesuffix("_backward") not in OP_TYPES
    }
    assert not unknown


def test_keys_persist(rig: Rig) -> None:
    """Keep one context per op and session: what a tool writes into it is there in all runs."""
    built = rig.build("chain")
    seen: list[Any] = []
    with apply(rig.tool(lambda context: context.__setitem__("mark", "here"), "mul")):
        built.run()
        handed = rig.tool(lambda context: seen.append(context.get("mark")), "mul")
        with apply(handed):
            built.run()
    assert seen == ["here"]


def test_values_are_not_kept(rig: Rig) -> None:
    """Call `context.release()` after each run: values are valid only while a routine runs."""
    (context,) = [c for c in _contexts(rig) if c["type"] == "mul"]
    with pytest.raises(StaleContextError):
        context.get_inputs()


def test_the_value_of_a_parameter_is_known_in_analysis(rig: Rig) -> None:
    """Pass `constant` to `open`, so that `context.value(i)` is the parameter in every mode."""
    built = rig.build("chain")
    seen: list[Any] = []

    def analyse(context: OpContext) -> None:
        value = context.value(1)
        seen.append(None if value is None else rig.backend.to_python(value))

    with apply(rig.tool(analyse, "mul")):
        built.run()
    assert rig.same(seen, [built.values["w"]])


def test_the_driver_describes_itself(rig: Rig) -> None:
    """Declare an API and known capabilities, and find no errors in `amanda_preflight`."""
    info = rig.info
    assert isinstance(info, DriverInfo)
    assert info.api == DRIVER_API
    assert info.name == rig.backend.driver
    assert info.modules
    assert info.namespaces
    assert all(pattern.partition("/")[0] == info.name for pattern in info.namespaces)
    assert not info.capabilities_in("") - set(CAPABILITIES)
    findings = list(rig.backend.installed().call("amanda_preflight") or ())
    assert all(isinstance(finding, Finding) and finding.message for finding in findings)
    assert not [finding for finding in findings if finding.severity == "error"]


def test_blind_spots_are_reported(rig: Rig) -> None:
    """List in `Attachment.coverage` what the driver cannot see, each with its reason."""
    with apply(rig.tool(lambda context: None, "mul")) as handle:
        coverage = handle.coverage()
    assert rig.info.name in coverage
    for gap in coverage[rig.info.name]:
        assert isinstance(gap, CoverageGap)
        assert gap.what
        assert gap.why


def test_everything_is_restored(rig: Rig) -> None:
    """Restore the framework when apply ends, and run no routine afterwards."""
    built = rig.build("chain")
    built.run()
    before = dict(rig.backend.found())
    assert before
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, *built.model.common_types)):
        built.run()
    after = rig.backend.found()
    assert [name for name in before if after.get(name) is not before[name]] == []
    outputs = built.run()
    assert len(executed) == 3
    assert rig.is_run(outputs, built)
