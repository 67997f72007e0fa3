"""Text to tree and back: `parse` and `format_file`. Knows the shape of a spec and nothing of its meaning."""
