"""The coverage gaps in which the two interceptors differ.

Owns these lists, for `coverage()` and for diagnostics. The attachment lists what no interceptor
sees.
"""

from __future__ import annotations

from collections.abc import Mapping

from amanda_core.interface import CoverageGap

__all__ = ["LIMITS"]

#: What neither sees, although it is in a program's hands.
_COMMON = (
    CoverageGap(
        "bindings of C++ extensions outside torch.ops",
        "register them with amanda_driver_torch.extensions.register_op",
    ),
    CoverageGap(
        "collectives that C++ code begins",
        "DistributedDataParallel reduces gradients and copies buffers so; what it reduces is seen "
        "where it is accumulated",
    ),
    CoverageGap(
        "the end of collectives that are awaited by a future or together with others",
        "routines after them run where the program waits for one by its own Work",
    ),
    CoverageGap(
        "backward passes under torch._dynamo.compiled_autograd._enable",
        "they run as a compiled graph of operators of its own; set "
        "torch._dynamo.config.compiled_autograd instead",
    ),
)
#: Interceptor -> what it does not see.
LIMITS: Mapping[str, tuple[CoverageGap, ...]] = {
    "native": (
        CoverageGap("torch.Tensor(...)", "a type's constructor is not in torch's tables"),
        *_COMMON,
    ),
    "function_mode": (
        CoverageGap(
            "torch.Tensor(...), early references to torch.from_numpy, torch.frombuffer",
            "torch's function protocol does not report it",
        ),
        CoverageGap("code under torch._C.DisableTorchFunction()", "it switches the protocol off"),
        *_COMMON,
    ),
}
