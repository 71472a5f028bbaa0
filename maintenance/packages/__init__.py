"""Distributions as users get them, and the libraries that pages contain."""
