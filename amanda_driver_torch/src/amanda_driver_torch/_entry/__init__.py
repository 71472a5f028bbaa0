"""What a call of the program goes through first: interceptors and patches."""
