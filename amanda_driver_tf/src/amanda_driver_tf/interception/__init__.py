"""The first code that a program's calls reach: the replaced functions of TensorFlow."""
