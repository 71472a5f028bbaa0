"""Instrumentation inside callables of `torch.compile` that stay compiled."""
