"""Gradients of the eager mode: backward passes, and gradient functions on tapes."""
