"""`attnc bench`: the generated kernels beside the libraries, in one interleaved run on one GPU.

run        what all share: cells, candidates that take turns in each, results
report     tables, JSON and bars
attention  the forward or the gradients: `cells` (shapes, masks, inputs, FLOPs), `peers` (cuDNN,
           FlashAttention, FlexAttention, eager PyTorch, the kernels of attnc/bench/specs)
decode, serving, prefill, host_cost, flex
           the same of what their names say

Two further benchmarks, of several GPUs and of the papers' claims, are in `tools/bench` of a checkout.
"""
