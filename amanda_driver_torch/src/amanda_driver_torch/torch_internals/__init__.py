"""Facts and private names of the installed PyTorch."""
