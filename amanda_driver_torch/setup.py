"""The optional part of the build: the native interceptor, if there is a compiler.

Everything else is in pyproject.toml. Without a compiler the installation succeeds, and
`amanda_driver_torch.interceptor()` tells that the interceptor in pure Python is used, and why.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/amanda_driver_torch/native")
FLAGS = (
    ["/std:c++17"]
    if sys.platform == "win32"
    # CPython's internal headers, which define frames, omit field initializers.
    else ["-std=c++17", "-O2", "-g0", "-fvisibility=hidden", "-Wno-missing-field-initializers"]
)
# For a wheel that fits every Python and machine.
PURE = os.environ.get("AMANDA_TORCH_PURE") == "1"

setup(
    ext_modules=[]
    if PURE
    else [
        Extension(
            "amanda_driver_torch._native",
            sources=sorted(str(path) for path in NATIVE.rglob("*.cpp")),
            depends=sorted(str(path) for path in NATIVE.rglob("*.h")),
            include_dirs=[str(NATIVE)],
            extra_compile_args=FLAGS,
            language="c++",
            optional=True,
        )
    ]
)
