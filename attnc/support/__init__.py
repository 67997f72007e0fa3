"""What generated modules call: checks of arguments, prepared launches, choice of configs, autograd,
operators.

Ordinary Python that needs torch, and triton or cupy, and nothing of attnc: `attnc compile` copies this
folder beside the modules, as `_support`, and `attnc compile --standalone` puts its text into each of them.
A module declares its kernels and their arguments (`TritonAttention`, `CudaAttention`); the code here makes
them a call.
"""
