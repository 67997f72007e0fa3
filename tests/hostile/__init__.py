"""Spec files that nobody means well with, and what the commands must not do with them."""
