"""The function mode: TensorFlow functions, replaced by instrumented twins when they are called."""
