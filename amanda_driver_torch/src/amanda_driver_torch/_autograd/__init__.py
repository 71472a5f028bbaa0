"""Gradients: nodes of autograd graphs, hooks on them, edited values in graphs."""
