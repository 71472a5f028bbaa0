"""Models of ONNX under tools, and faults in exported models."""
