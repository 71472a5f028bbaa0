"""The profiler of zeros: single elements, channels, blocks and patterns."""

from amanda_tools.sparsity.result import MeasuredTensor, Product, SparsityResult
from amanda_tools.sparsity.tool import Sparsity

__all__ = ["MeasuredTensor", "Product", "Sparsity", "SparsityResult"]
