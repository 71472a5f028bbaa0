"""Sequences of language models: the rows and positions of a call, and where values hold them."""
