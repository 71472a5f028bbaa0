"""Graphs that TensorFlow executes: functions and the graphs of sessions, analysed and rewritten."""
