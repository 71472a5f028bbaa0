"""What all modes share: the state of a thread, namespaces, and how inputs lie by position."""
