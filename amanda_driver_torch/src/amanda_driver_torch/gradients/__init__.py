"""Gradients: nodes of autograd graphs, hooks on them, and edited values in graphs."""
