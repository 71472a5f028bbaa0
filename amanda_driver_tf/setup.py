"""The optional part of the build: the native interceptor, if there is a compiler.

Everything else is in pyproject.toml. Without a compiler the installation succeeds, and
`amanda_driver_tf.interceptor()` tells that the interceptor in pure Python is used, and why.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/amanda_driver_tf/native")
FLAGS = (
    ["/std:c11"]
    if sys.platform == "win32"
    # CPython's internal headers, which define frames, omit field initializers.
    else ["-std=c11", "-O2", "-g0", "-fvisibility=hidden", "-Wno-missing-field-initializers"]
)
# For a wheel that fits every Python and machine.
PURE = os.environ.get("AMANDA_TF_PURE") == "1"

setup(
    ext_modules=[]
    if PURE
    else [
        Extension(
            "amanda_driver_tf._native",
            sources=sorted(path.as_posix() for path in NATIVE.glob("*.c")),
            depends=sorted(path.as_posix() for path in NATIVE.glob("*.h")),
            extra_compile_args=FLAGS,
            optional=True,
        )
    ]
)
