"""Gradients of rewritten graphs: the version of a value that each op of a gradient reads."""
