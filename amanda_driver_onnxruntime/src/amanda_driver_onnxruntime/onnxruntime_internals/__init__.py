"""Every private name of ONNX Runtime that the driver uses, and how values pass to and from it.

- `sessions` has the entry points, the model and options of a session, and sessions of parts.
- `bindings` has what a program bound to the inputs and outputs of a session.
- `values` converts between `OrtValue` and NumPy's arrays, and has their types.
"""
