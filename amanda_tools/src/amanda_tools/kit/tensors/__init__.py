"""Tensors as tools see them: types and shapes, values in main memory, and statistics."""
