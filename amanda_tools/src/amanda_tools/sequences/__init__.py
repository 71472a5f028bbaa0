"""Sequences as language models compute them: which rows and positions a call has, and where."""
