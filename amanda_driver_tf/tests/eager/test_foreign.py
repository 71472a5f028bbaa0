"""What other libraries put between a program and TensorFlow is named by the driver's preflight."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf

from amanda import apply
from amanda_core.testing.kit.tools import at_inputs, before, tool
from amanda_driver_tf.plugin import amanda_preflight

from .tensors import close, normal, variable


def double(value: Any) -> Any:
    return value * 2.0


def found() -> list[tuple[str, str]]:
    # Others are of the installation.
    return [
        (finding.severity, finding.message)
        for finding in amanda_preflight()
        if "callback" in finding.message or "run eagerly" in finding.message
    ]


def test_nothing_is_found_where_nothing_is() -> None:
    assert found() == []


def test_op_callbacks() -> None:
    tf.debugging.enable_check_numerics()
    try:
        ((severity, message),) = found()
    finally:
        tf.debugging.disable_check_numerics()
    assert severity == "warning"
    assert message.startswith("An op callback is set: tensorflow.python.debug")
    assert message.endswith("CheckNumericsCallback.callback")
    assert found() == []


def test_functions_that_run_eagerly() -> None:
    tf.config.run_functions_eagerly(True)
    try:
        assert found() == [("info", "tf.functions run eagerly: there are no graphs")]
    finally:
        tf.config.run_functions_eagerly(False)


def test_checks_of_numbers_that_the_program_turns_on_see_what_a_tool_changes() -> None:
    x = tf.zeros(2) + 1.0
    with apply(before("Log", lambda value: value * 0.0 - 1.0)):
        tf.debugging.enable_check_numerics()
        try:
            assert tf.reduce_sum(tf.ones(3) * 2.0).numpy() == 6.0
            with pytest.raises(tf.errors.InvalidArgumentError, match="NaN"):
                tf.math.log(x)
        finally:
            tf.debugging.disable_check_numerics()
        assert tf.reduce_all(tf.math.is_nan(tf.math.log(x)))


@pytest.mark.slow
def test_applying_tools_leaves_the_runtime_to_be_configured() -> None:
    program = (
        "import amanda, tensorflow as tf\n"
        "tool = amanda.Tool()\n"
        "seen = []\n"
        "tool.add_inst_for_op(lambda context: seen.append(context.op_type))\n"
        "with amanda.apply(tool):\n"
        "    tf.config.threading.set_intra_op_parallelism_threads(1)\n"
        "    tf.nn.relu(tf.ones(2))\n"
        "assert 'Relu' in seen\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_program_whose_functions_run_eagerly() -> None:
    """It runs in eager mode, with the same numbers, ops and steps."""
    x, w = normal(2, 3), variable(3, 2, seed=1)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.tanh(tf.matmul(x, w)))
        return y, tape.gradient(y, w)

    namespaces: set[str] = set()
    watch = tool(lambda context: namespaces.add(context.namespace.rpartition("/")[2]))
    tools = before("MatMul", double, 1), at_inputs("MatMul", double, 1), watch
    with apply(*tools):
        function = step()
        assert namespaces == {"function"}
        tf.config.run_functions_eagerly(True)
        try:
            namespaces.clear()
            eager = step()
            assert namespaces == {"eager"}
        finally:
            tf.config.run_functions_eagerly(False)
    hidden = tf.tanh(tf.matmul(x, w * 2.0))
    wanted = 2.0 * tf.matmul(x, 1.0 - hidden**2, transpose_a=True)
    for found in (function, eager):
        close(found[0], tf.reduce_sum(hidden))
        close(found[1], wanted)
