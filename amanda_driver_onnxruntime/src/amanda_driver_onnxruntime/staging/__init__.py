"""A routine's arithmetic as nodes of ONNX.

A routine gets values that carry those of one execution, so that their types and shapes are NumPy's.

- `recording` has these values, and what records what is computed with them.
- `functions` has the functions of NumPy that have nodes.
- `quantization` has the numbers that are quantized by operators.
"""

from amanda_driver_onnxruntime.staging import functions  # noqa: F401  # It registers them.
from amanda_driver_onnxruntime.staging.quantization import quantized
from amanda_driver_onnxruntime.staging.recording import NotStagedError, Recorder, Staged

__all__ = ["NotStagedError", "Recorder", "Staged", "quantized"]
