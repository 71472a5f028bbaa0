"""Graphs as TensorFlow made them: their nodes, the gradients of ops, and the plans of ops."""
