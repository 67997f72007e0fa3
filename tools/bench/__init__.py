"""Benchmarks of published claims. They run from a checkout alone and are not in the wheel.

papers     `attnc bench --papers`: the loop orders and warp splits of the FlashAttention papers
ranks      `attnc bench --ranks N`: one GPU beside N, with `ranks_peers` (other ways to share a call out)
           and `ranks_report` (the tables)
join_models  runs of `attnc bench --models` with other libraries, as one file
"""
