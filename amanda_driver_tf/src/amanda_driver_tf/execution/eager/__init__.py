"""The eager mode: operators that TensorFlow executes one by one."""
