"""Names that generated modules use for themselves, and what becomes of a spec's names that clash with them.

In a kernel, a value that is loaded from an input gets another name (`LoadNames`), and so does a size
(`own_sizes`). The callable's parameters are the spec's inputs by name: there a clash is refused
(`check_lowerable`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain, count
from keyword import iskeyword

from attnc.expr.functions import REAL

#: Parameters and variables of kernels and of their steps, where values loaded from inputs have names too.
KERNEL = frozenset((
    "acc", "alpha", "at", "B", "b", "BLOCK_D", "BLOCK_M", "BLOCK_N", "BLOCK_S", "config", "D", "d", "DELTA",
    "delta", "delta_head", "delta_rows", "DK", "dk", "dlse_head", "DO", "do", "do_head", "dp", "DQ", "dq",
    "dq_at", "dq_head", "ds", "dsink_row", "DV", "Dv", "dv", "EARLY_DP", "exists", "first", "first_head",
    "first_pos", "first_row", "float", "full_hi", "full_lo", "G", "group", "H", "h", "h_kv", "head",
    "heads",
    "hi", "Hkv", "i", "j", "K", "k", "k_2", "k_end", "k_first", "keep", "keep_scale", "kept", "kept_hi",
    "kept_lo", "kv_hi",
    "kv_idx", "kv_lo", "kv_tiles", "l", "l_new", "l_rows", "last", "last_pos", "later_page", "LAZY", "length",
    "LN2", "lo",
    "LOG2E", "lse", "LSE2", "lse2", "lse2_head", "lse2_rows", "lse_at", "lse_head", "lse_rows", "M", "m",
    "m_new", "M_padded", "m_rows", "m_tile", "MASKED", "N", "n", "next", "next_page", "O", "o", "o_at",
    "o_rows", "out", "p", "PAGE", "page", "part", "partial", "PARTS", "parts_ptr", "Q", "q", "q_2", "q_at",
    "own_page", "PDL", "q_first", "q_head", "q_hi", "q_idx", "q_lo", "q_pos", "q_rows", "q_tiles", "range",
    "rank",
    "row", "row_lo", "row_tiles", "ROWS", "rows", "run", "s", "SCALE", "score", "SECTION", "section",
    "SHARE", "share", "shift", "SPLIT", "split", "split_hi", "split_lo", "SPLITS", "start", "stop", "tile",
    "third_page", "tiles", "tl", "TMA", "torch", "triton", "TWO_LOG2E", "V", "v", "weight", "zero",
    "ZERO_FILL",
))  # fmt: skip
#: Globals of a module, and variables of its callables.
MODULE = frozenset((
    "acc", "ast", "backward", "backward_config", "BACKWARD_CONFIGS", "BACKWARD_TUNED", "call", "chosen",
    "combine", "Config", "fallbacks",
    "config", "CONFIGS", "configs", "ctx", "delta", "dk", "dk_config", "dkdv_config", "dlse", "do", "dq",
    "dq_config", "dv", "dv_config", "enumerate", "fixed", "float", "forward", "functools", "grid", "inspect",
    "launches",
    "isinstance", "key_tiles", "l", "layout", "layouts", "LAZY", "len", "LN2", "LOG2E", "lse2", "m", "made",
    "M_padded", "NamedTuple", "out", "pages", "parts", "range", "results", "rows", "rows_config",
    "RuntimeError",
    "SCALE", "shares", "splits", "TensorDescriptor", "tiles", "tl", "tma", "torch", "triton", "TUNED",
    "Tuned", "tuple", "TWO_LOG2E", "TypeError", "ValueError",
    "AttributeError", "least", "map", "max", "min", "PARAMS", "VARIANTS",
    "Backward", "CALL", "Gradient", "Kernel", "Made", "Part", "Split", "Tensor", "TritonAttention",
))  # fmt: skip
#: Variables of the function beside a target's modules, which picks one of them and takes the same inputs.
DISPATCH = frozenset(("iter", "key", "list", "next", "options", "schedule", "sizes"))
#: The same of a CUDA module: what its callable and the module have besides.
CUDA_MODULE = frozenset((
    "acc", "Any", "args", "Callable", "Config", "config", "CONFIGS", "ctypes", "CudaAttention", "Kernels",
    "Gpu", "gpu",
    "hashlib", "joining", "kernels", "l", "launch", "m", "NamedTuple", "numbers", "os", "out", "parts",
    "Path", "rows", "rows_aligned", "stat", "struct", "tempfile", "torch", "TUNED",
    "section", "kv_section", "dq_sum",
    "dk_at", "do_at", "dq_at", "dv_at", "k_at", "o_at", "q_at", "v_at",
    "ROW_TILE",
))  # fmt: skip
#: Keywords of C++20, and names with a meaning in CUDA without any header.
CPP = frozenset((
    "alignas", "alignof", "and", "and_eq", "asm", "auto", "bitand", "bitor", "bool", "break", "case",
    "catch", "char", "char16_t", "char32_t", "char8_t", "class", "co_await", "co_return", "co_yield",
    "compl", "concept", "const", "const_cast", "consteval", "constexpr", "constinit", "continue",
    "decltype", "default", "delete", "do", "double", "dynamic_cast", "else", "enum", "explicit", "export",
    "extern", "false", "float", "for", "friend", "goto", "if", "inline", "int", "long", "mutable",
    "namespace", "new", "noexcept", "not", "not_eq", "nullptr", "operator", "or", "or_eq", "private",
    "protected", "public", "register", "reinterpret_cast", "requires", "return", "short", "signed",
    "sizeof", "static", "static_assert", "static_cast", "struct", "switch", "template", "this",
    "thread_local", "throw", "true", "try", "typedef", "typeid", "typename", "union", "unsigned", "using",
    "virtual", "void", "volatile", "wchar_t", "while", "xor", "xor_eq",
    "blockDim", "blockIdx", "cuda", "gridDim", "nvcuda", "signbit", "size_t", "std", "threadIdx",
    "warpSize",
    "char2", "dim3", "double2", "float2", "float4", "int2", "int4", "short2", "uchar4", "uint", "uint4",
    "abs", "acos", "asin", "atan", "ceil", "clock", "cos", "cosh", "erf", "exp", "exp10", "exp2",
    "fabs", "fabsf", "fdim", "floor", "fma", "fmaf", "fmax", "fmaxf", "fmin", "fminf", "fmod", "free",
    "frexp", "gamma", "hypot", "isfinite", "isinf", "isnan", "j0", "j1", "jn", "labs", "ldexp", "lgamma",
    "llabs", "llmax", "llmin", "log", "log10", "log1p", "log2", "logb", "malloc", "max",
    "memcpy", "memset", "min", "modf", "norm", "pow", "powf", "printf", "remainder", "rint", "round",
    "rsqrt", "rsqrtf", "sin", "sincos", "sinh", "sqrt", "tan", "tanh", "tgamma", "time",
    "trap", "trunc", "umax", "umin", "y0", "y1", "yn",
)) | {f"{function}f" for function in REAL}  # fmt: skip
#: Functions, constants, parameters and variables of a `.cu` file, besides those that Triton kernels have too.
CUDA_KERNEL = frozenset((
    "a", "A", "address", "after", "after_qk", "after_v", "ALIGNED", "alphas", "any_lane", "Args", "args",
    "at", "at_qk", "at_v", "AT_ONCE", "ATTNC_SHIM", "b0", "b1", "before", "bf16", "bits", "branch", "c",
    "All", "Keeps", "keeps",
    "c0",
    "c1", "c2", "c3", "Chunk", "chunk", "chunks", "CHUNKS", "column", "COLUMNS", "commit_copies",
    "condition", "copy_async", "copy_chunk", "copy_k", "copy_q", "copy_qk_rows", "copy_rows", "copy_v",
    "copy_v_rows", "COUNT", "D_TILE", "DV_TILE", "e", "element", "EXCHANGE", "exp2_", "f16", "factors",
    "floor_div", "floor_mod", "forward_tile", "from", "from_lane", "g", "GROUPS", "high", "INF", "inside",
    "k_next", "k_tile", "k_tiles", "keep_dropout", "key", "key0", "key1", "l_old", "lane", "left",
    "load_pieces", "load_pieces_transposed", "low", "lower_bound", "lower_bound_real",
    "mask", "max_", "maxima", "middle",
    "min_", "multiply_add", "multiply_pv", "multiply_qk", "otherwise", "OWN", "own_column", "own_row",
    "pack", "pair", "PITCH", "place", "product", "product0", "product1", "q_next", "q_tile", "quotient",
    "r", "row_max", "row_sum", "scale", "scores", "second", "shared", "sigmoid_",
    "log2e", "size", "source", "stage",
    "STAGES", "store_chunk", "store_o", "stride", "sum", "sums", "swizzle", "t", "tanh_", "then",
    "THREADS", "to", "to_float", "u32", "upper_bound",
    "upper_bound_real", "v_at", "v_first", "v_next", "v_tile", "v_tiles",
    "find", "find_sequence", "k_pages", "of", "of_lane", "other", "PageNumbers", "v_pages", "copy_pages",
    "copy_k_pages", "copy_v_pages", "pages", "cu_seqlens", "keys", "number", "outputs", "PAGE",
    "page_stride", "Pages", "Place",
    "q_end", "queries", "Rows", "sequence", "table", "table_stride", "values",
    "Value", "value",
    "any_thread", "atomicAdd", "group", "head_stride", "Heads", "HIGH", "lost", "LOW", "lse_parts", "m_all",
    "o_parts", "PHI", "SHARE", "SHARERS", "SPLITS", "thread", "top", "wrong", "w", "wait_copies", "warp",
    "WARP_M", "WARP_N", "WARPS", "where", "words", "x", "y",
    "below", "below_qk", "below_v", "correction", "half", "large", "load_columns", "load_operand",
    "load_turned_columns",
    "load_word",
    "Operand", "small", "split", "to_operand", "upwards",
))  # fmt: skip
#: The same of the backward's `.cu` files.
CUDA_BACKWARD = frozenset((
    "DEPTH", "DQ_COLUMNS", "DQ_ROWS", "DQ_SIZE", "DQ_WARPS", "DV_COLUMNS", "D_COLUMNS", "I", "J",
    "KV_SECTION", "LEFT_WIDTH", "PERIOD", "Pair", "SIZE", "WHOLE", "WHOLE_D", "WHOLE_DQ", "WHOLE_DV",
    "WIDTH", "add_product", "add_shared_product", "at_tile", "atomic_add", "block_sum", "copy",
    "delta_pair", "delta_tile", "do_tile", "do_tiles", "dot", "dq_sum", "draw_four", "drawn", "ds_tile",
    "first_key", "first_query", "from_lane_u32", "gradients", "kv_next", "left_first", "left_to_tile",
    "load_left",
    "lse2_pair", "lse2_tile", "multiply_rows", "multiply_transposed", "p_tile", "piece", "pieces",
    "products", "right", "right_first", "round_to", "rounded", "store_rows", "store_sums", "theirs",
    "to_left", "to_tile", "total", "xs", "ys",
))  # fmt: skip
#: Names in the kernels of the Hopper target besides.
CUDA_HOPPER = frozenset((
    "ABOVE", "BARRIERS", "BARRIERS_AT", "CONSUMERS", "COPY_REGISTERS", "ENTRY_REGISTERS", "K_AT", "K_BYTES",
    "K_EMPTY", "K_FULL", "LIMIT", "MULTIPLY_REGISTERS", "No", "OVERLAP", "O_AT", "O_BYTES", "O_TILES",
    "PIECES", "QK_PIECES", "Q_AT", "Q_BYTES", "Q_EMPTY", "Q_FULL", "Q_TILES", "RECORDS", "RECORDS_AT",
    "RECORD_EMPTY", "RECORD_FULL", "Record", "Ring", "TensorMap", "VECTORS", "V_AT", "V_BYTES", "V_EMPTY",
    "V_FULL", "V_PIECES", "X_AT", "X_BYTES", "X_EMPTY", "X_FULL", "Yes", "accumulate", "again", "all_meet",
    "arrivals", "arrives", "at_first", "at_first_2", "at_first_3", "at_first_4", "barrier", "barrier_of",
    "base", "batch", "bytes", "claim", "clear_values", "consumer", "copy_tiles", "count_lanes", "draw",
    "drop", "even", "exponent", "exponentials", "factor", "failed", "find_tiles", "finish", "finish_pv",
    "first_key", "first_p", "grows", "index", "is_partial", "joins", "k_map", "kind", "largest",
    "last_tile", "leading", "leads", "least", "least_kept", "load_shared", "load_vectors", "may_be_partial",
    "mbarrier_arrive", "mbarrier_arrive_if", "mbarrier_expect", "mbarrier_fence", "mbarrier_init",
    "mbarrier_wait", "met_hi", "mine", "more", "most", "moves", "multiply_tiles", "next_p", "o_map",
    "o_row", "odd", "of_key", "of_key_2", "of_key_3", "of_key_4", "of_pair", "parity", "permute_bytes",
    "philox", "pin", "pitch", "previous", "proxy_fence", "q_map", "record", "records", "release_k",
    "release_v", "release_x", "round_p", "row_maxima", "scale_rows", "sees", "settled", "start_pv",
    "start_qk", "step", "store_pieces", "store_shared", "threads", "tma_commit", "tma_load", "tma_prefetch",
    "tma_store", "tma_wait", "tma_wait_read", "u64", "uniform", "up", "v_lo", "v_map", "warpgroup",
    "warpgroup_give_registers", "warpgroup_take_registers", "warpgroups_meet", "wgmma", "wgmma_commit",
    "wgmma_descriptor", "wgmma_fence", "wgmma_wait", "word", "writes", "x0", "x1", "x2", "x3",
))  # fmt: skip
#: What the names of an attention's kernels end with, or go on with.
KERNELS = ("forward", "backward", "combine", "preprocess")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """The words that modules for a target use. module: globals and variables of callables; kernel: names
    inside kernels; has_strides: callables read the strides of their arguments into variables.
    """

    module: frozenset[str]
    kernel: frozenset[str]
    has_strides: bool

    def clashes(self, name: str) -> bool:
        """Whether a module cannot have a parameter or a function of this name."""
        is_stride = self.has_strides and name.startswith("stride_")
        return iskeyword(name) or name in self.module or name.startswith("_") or is_stride

    def clashes_as_input(self, name: str, attention: str) -> bool:
        """Whether no input can have this name: a variable has it, or a kernel of the attention may have
        it.
        """
        is_kernel = name.startswith(tuple(f"{attention}_{kernel}" for kernel in KERNELS))
        return self.clashes(name) or name in DISPATCH or is_kernel

    def clashes_as_size(self, name: str) -> bool:
        """Whether a module has other uses for this name of a size, which it calls otherwise then."""
        is_parameter = name.startswith("stride_") or name.endswith("_ptr")
        return self.clashes(name) or name in self.kernel or is_parameter


#: Of modules whose kernels are Triton's, and of those whose kernels are C++.
TRITON = Reserved(module=MODULE, kernel=KERNEL, has_strides=False)
CUDA = Reserved(
    module=MODULE | CUDA_MODULE,
    kernel=KERNEL | CUDA_KERNEL | CUDA_BACKWARD | CUDA_HOPPER | CPP,
    has_strides=True,
)


def own_name(name: str) -> str:
    """What a kernel calls a value of this name, whatever its target."""
    taken = name in CUDA.kernel or TRITON.clashes_as_size(name)
    return f"{name.lstrip('_')}_value" if taken else name


def own_sizes(names: Collection[str], inputs: Collection[str]) -> dict[str, str]:
    """What generated code calls the sizes that cannot keep their names, whatever the target: `t_size` for t.

    names: of all sizes that the spec chose; inputs: of its tensors, whose gradients have names too.
    """
    gradients = {f"d{name}" for name in inputs}
    values = tuple(f"{name}_" for name in gradients)
    found: dict[str, str] = {}
    taken = {*names, *inputs}
    for name in names:
        clashes = TRITON.clashes_as_size(name) or CUDA.clashes_as_size(name)
        if clashes or name in gradients or name.startswith(values):
            plain = f"{name.strip('_')}_size"
            others = (f"{plain}_{i}" for i in count(2))
            fresh = next(free for free in chain((plain,), others) if free not in taken)
            found[name] = fresh
            taken.add(fresh)
    return found
