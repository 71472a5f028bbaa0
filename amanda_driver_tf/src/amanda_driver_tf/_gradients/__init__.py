"""Gradients of graphs that are rewritten: which version of a value each op of them reads."""
