"""The first code that a program's calls reach: interceptors and patches."""
