"""Gradients: those that tapes compute eagerly, and those in rewritten graphs."""
