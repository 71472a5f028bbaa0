"""Graphs as TensorFlow made them: their nodes, which op is whose gradient, plans of their ops."""
