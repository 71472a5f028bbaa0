"""Amanda's driver for ONNX Runtime: the model of a session is cut where tools act.

The entry point names `plugin`. Nothing here is public.
"""
