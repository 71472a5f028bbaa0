"""The operators of PyTorch and the positions of their arguments. Independent of sessions."""
