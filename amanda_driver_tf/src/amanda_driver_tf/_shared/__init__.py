"""Shared by all modes: the state of a thread, namespaces, and the positions of inputs."""
