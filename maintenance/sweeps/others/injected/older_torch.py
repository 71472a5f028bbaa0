"""Plugin of pytest: stand-ins for names of PyTorch that copies of older tests import."""

import importlib
import sys
import types
import unittest
from typing import Any


class Gone:
    """Something that this PyTorch lacks; a test that makes one is skipped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise unittest.SkipTest(f"{type(self).__name__} is not of this release of PyTorch")


def unchanged(test: Any) -> Any:
    """Decorate a test with a condition that is not of this PyTorch, which holds."""
    return test


def moved(module: str, name: str) -> Any:
    """Return what is in another module now."""
    return getattr(importlib.import_module(module), name)


#: Module -> names -> what stands there. A module that is not here is made.
NAMES: dict[str, dict[str, Any]] = {
    "torch._dynamo.testing": {"requires_static_shapes": unchanged, "skipIfPy311": unchanged},
    "torch._dynamo.utils": {"ifdyn": lambda yes, no: no, "ifunspec": lambda yes, no: no},
    "torch._export": {"dynamic_dim": Gone},
    "torch._functorch.aot_autograd": {"Interpreter": Gone},
    "torch._inductor.codecache": {
        "valid_vec_isa_list": moved("torch._inductor.cpu_vec_isa", "valid_vec_isa_list")
    },
    "torch._inductor.codegen.cpp": {"CppVecKernelChecker": Gone},
    "torch._inductor.compile_fx": {"complex_memory_overlap": Gone},
    "torch._inductor.ir": {"InterpreterShim": Gone},
    "torch._inductor.triton_heuristics": {"CachingAutotuner": Gone},
    "torch.distributed._spmd": {},
    "torch.distributed._spmd.comm_tensor": {"CommTensor": Gone, "_wait_comm": Gone},
    "torch.testing._internal.inductor_utils": {"HAS_CUDA": False},
    "functorch.experimental.control_flow": {"UnsupportedAliasMutationException": Gone},
}

for module, names in NAMES.items():
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        found = sys.modules[module] = types.ModuleType(module)
        found.__path__ = []
    for name, value in names.items():
        if not hasattr(found, name):
            setattr(found, name, value)
