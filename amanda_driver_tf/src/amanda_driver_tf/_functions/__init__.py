"""The function mode: functions of TensorFlow, of which instrumented ones run instead."""
