"""The versions of TensorFlow that this driver was tested with.

`docs/support.md` shows the results. Does not import TensorFlow.
"""

from __future__ import annotations

from amanda_core.driver_kit import FrameworkVersions

__all__ = ["VARIABLE", "VERSIONS"]

#: Environment variable that selects an interceptor.
VARIABLE = "AMANDA_TF_INTERCEPTOR"

VERSIONS = FrameworkVersions(
    framework="TensorFlow",
    module="tensorflow",
    distributions=("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
    oldest="2.16",
    newest="2.21.0",
    driver="amanda-driver-tf",
    variable=VARIABLE,
    self_test="amanda_driver_tf.self_test",
)
