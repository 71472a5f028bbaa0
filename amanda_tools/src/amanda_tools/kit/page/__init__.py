"""Self-contained HTML pages: composition, libraries of others, colours, what scripts share."""
