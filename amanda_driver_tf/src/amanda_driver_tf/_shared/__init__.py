"""What all modes share: the state of a thread, namespaces, and the positions of inputs."""
