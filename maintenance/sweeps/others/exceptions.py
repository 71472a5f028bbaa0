"""Others' tests that may fail under a tool, each with its reason.

Such a test checks something that a tool necessarily changes, such as the number of objects or the
frames of a stack, or something that Amanda refuses with a named error. Exceptions that no test
needs any more are reported as stale.
"""

from __future__ import annotations

import dataclasses
import fnmatch

from .comparing import FORWARD, TOOLS


@dataclasses.dataclass(frozen=True)
class Excepted:
    """Failures that are explained.

    Attributes:
        suite: Pattern of the suite.
        test: Pattern of the test's id.
        reason: The reason, as printed in others.md.
        tools: Tools under which the test may fail.
    """

    suite: str
    test: str
    reason: str
    tools: tuple[str, ...] = (*TOOLS, *FORWARD)

    def covers(self, suite: str, test: str, tool: str) -> bool:
        """Return True if this explains that a test fails under a tool."""
        return (
            tool in self.tools
            and fnmatch.fnmatchcase(suite, self.suite)
            and fnmatch.fnmatchcase(test, self.test)
        )


#: Of a test that was seen to fail without Amanda, too, if torch compiles nothing, under tools under
#: which callables run eagerly.
EAGER = (
    "Checks what `torch.compile` compiled, which runs eagerly under tools; it fails, too, "
    'without Amanda under `torch.compiler.set_stance("force_eager")`'
)
#: The same of a test of which only some frames run eagerly; the reason of the coverage follows.
EAGER_FRAME = (
    "Checks what `torch.compile` compiled, of which a frame runs eagerly under tools; it fails, "
    'too, without Amanda under `torch.compiler.set_stance("force_eager")`. The coverage says: '
)
#: How the reasons of frames begin that are not limits of the driver, but its defects.
DEFECT = "the backend fails on the woven graph"

#: In the order in which they are tried.
EXCEPTED: tuple[Excepted, ...] = (
    *(
        Excepted(
            "torch",
            f"test_indexing.py::TestIndexingCPU::{test}",
            "Counts warnings, which Python shows once for each line. PyTorch ascribes a warning to "
            "the line that called the operator, which is one of Amanda's",
        )
        for test in ("test_bool_indices_cpu", "test_byte_mask_cpu")
    ),
    Excepted(
        "torch-xpu",
        "test_misc_xpu.py::MiscTests*::test_fail_on_recompile_error_message",
        "Expects that the first compilation fails under the stance `fail_on_recompile`, where "
        "code that was not yet compiled for the tools is compiled",
        tools=FORWARD,
    ),
    *(
        Excepted(
            "torch-2.1",
            f"inductor/{test}",
            "Counts the kernels that Inductor makes; routines on the host run between them",
            tools=("none-forward", "shipped-forward"),
        )
        for test in (
            "test_cpu_repro.py::CPUReproTests::test_transpose_copy",
            "test_cpu_repro.py::CPUReproTests::test_transpose_sum2d_cpu_only",
            "test_torchinductor.py::CpuTests::test_vertical_fusion1_cpu",
        )
    ),
    *(
        Excepted(
            "torch-xpu",
            f"test_aot_autograd_cache_xpu.py::AOTAutogradCache{test}",
            "Counts entries of the compilers' caches, or asks for the key of a graph, which graphs "
            "with routines on the host have not",
            tools=("none-forward", "shipped-forward"),
        )
        for test in (
            "Tests::test_dynamic_shapes_different_sizes",
            "Tests::test_nn_module_with_params_global_constant",
            "BundledTests::test_different_custom_estimator_uuids_cause_cache_miss",
            "BundledTests::test_regional_inductor_with_backward",
            "BundledTests::test_view_replay",
            "PicklerTests::test_different_graphs",
            "PicklerTests::test_normal_torch_function",
            "PicklerTests::test_runtime_only_configs_do_not_change_key",
        )
    ),
    Excepted(
        "torch-xpu",
        "test_misc_xpu.py::MiscTests::test_torch_dynamo_codegen_pow",
        "Looks for the name of an operator in the code that Inductor makes, where it is in a "
        "comment about the values that a routine on the host gets",
        tools=("none-forward", "shipped-forward"),
    ),
    Excepted(
        "torch-xpu",
        "test_misc_xpu.py::MiscTests::test_module_deepcopy",
        "Counts the compilations of a function that makes a new module at each call; code for "
        "tools serves one module",
        tools=FORWARD,
    ),
    Excepted(
        "torch-xpu",
        "test_misc_xpu.py::MiscTests::test_compile_non_infra_empty_with_disalloed_dispatch_mode",
        "Compiles the `__torch_dispatch__` of a mode, which runs inside an operator: inside it, "
        "nothing is compiled under tools",
        tools=FORWARD,
    ),
    Excepted(
        "torch-2.1",
        "dynamo/test_aot_autograd.py::*::test_double_backward_errors",
        "Expects the error of a second backward pass through compiled code, which is another one: "
        "the saved tensors are those that a routine on the host returned",
        tools=("none-forward", "shipped-forward"),
    ),
    Excepted(
        "torch-2.1",
        "dynamo/test_recompile_ux.py::*::test_drop_cache_on_skip",
        "Expects that code is dropped beyond the limit of compilations, where code for tools and "
        "without them stands side by side",
        tools=FORWARD,
    ),
    Excepted(
        "torch",
        "dynamo/test_autograd_function.py::*::test_autograd_function_has_graph_break",
        "Counts frames that are compiled inside the `forward` of an `autograd.Function`, which is "
        "one operator: inside it, nothing is compiled under tools",
        tools=FORWARD,
    ),
    Excepted(
        "tensorflow",
        "polymorphic_function_test.py::*::test_frequent_retracing_warning",
        "Expects that nothing is logged, where `effective_path` logs that it leaves out runs",
        tools=("shipped",),
    ),
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
    *(
        Excepted(
            "tensorflow",
            f"pywrap_tfe_test.py::Tests::{test}",
            "Calls TensorFlow's fast path itself, without the second way that every generated "
            "function has, which is the one that an op may take under a tool",
        )
        for test in (
            "testFastpathExecute_AddNTapeWrite",
            "testFastpathExecute_InvalidInputs",
            "testFastpathExecute_ResourceVariableTapeWrite",
            "testIntAttrThatDoesNotFitIn32Bits",
        )
    ),
    Excepted(
        "tensorflow",
        "forwardprop_test.py::ForwardpropTest::testJVPFunctionUsedByAccumulatorForOps",
        "Registers a JVP function of its own with TensorFlow's C API, which is not asked about an "
        "op whose backward is watched",
    ),
    Excepted(
        "tensorflow",
        "ops_test.py::OperationTest::testUpdateInput",
        "Changes an input of an op that has run, by a private method, and runs it in another "
        "session, where Amanda uses what it made for the first",
        tools=("none",),
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
    """Return why a test may fail under a tool, or an empty string if nothing explains it."""
    for excepted in EXCEPTED:
        if excepted.covers(suite, test, tool):
            return excepted.reason
    return ""
