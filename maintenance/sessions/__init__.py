"""What the sessions of noxfile.py have in common; needs only the standard library and nox."""
