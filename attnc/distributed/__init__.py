"""Attention over several GPUs: who computes which scores, what moves, and how partial results meet.

The host plans with integers alone (`spans`, `cut`, `plan`), from the same closed forms that make a kernel's
loops.
"""
