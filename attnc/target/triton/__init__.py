"""The Triton target: every kernel of an attention in one Python module."""
