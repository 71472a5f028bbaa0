"""What this driver knows of the PyTorch that is installed."""
