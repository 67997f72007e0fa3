"""`attnc bench`: the generated kernels beside the libraries, in one interleaved run on one GPU.

cells   what is measured: shapes, masks, inputs, FLOPs of the forward or the backward
peers   who is measured: cuDNN, FlashAttention-2, FlexAttention, eager PyTorch
ours    the generated kernels, compiled from attnc/bench/specs
run     compile all in parallel first, then time cell by cell
report  Markdown, JSON and a plot
decode, serving, prefill, host_cost, papers, flex, ranks: the same of what their names say
"""
