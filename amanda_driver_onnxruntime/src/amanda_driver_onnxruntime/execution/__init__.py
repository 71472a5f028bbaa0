"""How models run under tools: what they consist of, their parts, and their control flow."""
