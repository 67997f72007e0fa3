"""Names that generated modules use for themselves, and what becomes of a spec's names that clash with them.

In a kernel, a value that is loaded from an input gets another name (`LoadNames`). The callable's parameters
are the spec's inputs by name, and sizes keep their names everywhere: there a clash is refused
(`check_lowerable`).
"""

from __future__ import annotations

from keyword import iskeyword

#: Parameters and variables of kernels and of their steps, where values loaded from inputs have names too.
KERNEL = frozenset((
    "acc", "alpha", "at", "B", "b", "BLOCK_D", "BLOCK_M", "BLOCK_N", "BLOCK_S", "config", "D", "d",
    "DELTA", "delta", "delta_head", "delta_rows", "DK", "dk", "dlse_head", "DO", "do", "do_head", "dp",
    "DQ", "dq", "dq_head", "ds", "dsink_row", "DV", "Dv", "dv", "exists", "first", "first_head",
    "first_pos", "first_row", "float", "full_hi", "full_lo", "G", "group", "H", "h", "h_kv", "head",
    "heads", "hi", "Hkv", "i", "j", "K", "k", "k_2", "k_end", "k_first", "keep", "keep_scale", "kept",
    "kv_hi", "kv_idx", "kv_lo", "kv_tiles", "l", "l_new", "l_rows", "last", "last_pos", "LAZY",
    "length", "LN2", "lo", "LOG2E", "lse", "LSE2", "lse2", "lse2_head", "lse2_rows", "lse_at",
    "lse_head", "lse_rows", "M", "m", "m_new", "M_padded", "m_rows", "m_tile", "MASKED", "N", "n",
    "next", "O", "o", "o_at", "o_rows", "out", "p", "PAGE", "page", "part", "partial", "Q", "q", "q_2",
    "q_at", "q_first", "q_head", "q_hi", "q_idx", "q_lo", "q_pos", "q_rows", "q_tiles", "range", "rank",
    "row", "row_lo", "row_tiles", "ROWS", "rows", "run", "s", "SCALE", "score", "SECTION", "section",
    "share", "shift", "SPLIT", "split", "split_hi", "split_lo", "SPLITS", "start", "stop", "tile",
    "tiles", "tl", "TMA", "torch", "triton", "TWO_LOG2E", "V", "v", "weight", "zero",
))  # fmt: skip
#: Globals of a module, and variables of its callables.
MODULE = frozenset((
    "acc", "backward", "backward_config", "BACKWARD_CONFIGS", "Config", "config", "CONFIGS", "ctx",
    "delta", "dk", "dlse", "do", "dq", "dv", "enumerate", "float", "functools", "grid", "isinstance",
    "key_tiles", "l", "LAZY", "len", "LN2", "LOG2E", "lse2", "lse_parts", "m", "M_padded", "NamedTuple",
    "o_parts", "out", "pages", "range", "RuntimeError", "SCALE", "shares", "splits", "TensorDescriptor",
    "tiles", "tl", "tma", "torch", "triton", "TUNED", "tuple", "TWO_LOG2E", "TypeError", "ValueError",
))  # fmt: skip
_KERNELS = ("forward", "backward", "combine", "preprocess")


def clashes(name: str) -> bool:
    """Whether a module cannot have a parameter or a function of this name."""
    return iskeyword(name) or name in MODULE or name.startswith("_")


def clashes_with_kernel(name: str, attention: str) -> bool:
    """Whether the name could be that of one of the attention's kernels."""
    return name.startswith(tuple(f"{attention}_{kernel}" for kernel in _KERNELS))


def own_name(name: str) -> str:
    """What a kernel calls a value of this name."""
    taken = name in KERNEL or clashes(name) or name.endswith("_ptr") or name.startswith("stride_")
    return f"{name.lstrip('_')}_value" if taken else name
