"""Quantization of weights and activations: simulated after or during training.

A package of its own, since it needs NumPy, and PyTorch to learn its steps.
"""

from amanda_tools.quantize.result import QuantizedActivation, QuantizedWeight, QuantizeResult
from amanda_tools.quantize.tool import Quantize

__all__ = ["Quantize", "QuantizeResult", "QuantizedActivation", "QuantizedWeight"]
