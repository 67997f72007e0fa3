"""Names that generated modules use for themselves, and what becomes of a spec's names that clash with them.

In a kernel, a value that is loaded from an input then gets another name (`LoadNames`), and so does a size
(`own_sizes`). Attentions and inputs are names of the module's interface: what clashes there is refused
(`check_lowerable`), and that is a parameter or a tensor which the function really has.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, count
from keyword import iskeyword

from attnc.expr.functions import REAL
from attnc.model.attention import Attention
from attnc.model.schedule import Schedule, knobs_of
from attnc.plan.ir_decode import is_decode

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
    "SHARE", "share", "shares", "shift", "SPLIT", "split", "split_hi", "split_lo", "SPLITS", "start",
    "stop", "tile",
    "third_page", "tiles", "tl", "TMA", "torch", "triton", "TWO_LOG2E", "V", "v", "weight", "zero",
    "ZERO_FILL",
))  # fmt: skip
#: What the texts of a declared call mention besides sizes: configs, tiles, counts of programs and splits.
DECLARED = frozenset((
    "BLOCK_M", "BLOCK_N", "BLOCK_S", "config", "dk_config", "dkdv_config", "dq_config", "dq_floats",
    "dv_config", "EARLY_DP", "KV_SECTION", "M_padded", "PARTS", "PDL", "ROW_TILE", "rows", "rows_config",
    "SECTION", "SHARE", "shared", "SPLIT", "SPLITS", "STAGES", "tiles", "TMA", "WARPS",
))  # fmt: skip
#: Globals of a module and of the file beside the modules, whatever the target.
GLOBALS = frozenset((
    "Backward", "BACKWARD_CONFIGS", "BACKWARD_TUNED", "CALL", "Config", "CONFIGS", "CudaAttention",
    "Gradient", "GUESS", "HIGH", "HopperAttention", "Kernel", "Kernels", "LAZY", "LN2", "LOG2E", "LOW",
    "Made", "NamedTuple", "PARAMS", "Part", "PHI", "SCALE", "Split", "Tensor", "TmaKernels",
    "TritonAttention", "TUNED", "Tuned", "TWO_LOG2E", "VARIANTS",
))  # fmt: skip
#: What the function beside the modules reads, which takes their inputs too.
READ = frozenset(("CALL", "isinstance", "iter", "list", "next", "options", "ValueError", "VARIANTS"))
#: Parameters and tensors of a function with gradients, of one whose outer loop runs over keys, and of one
#: that decodes.
WITH_GRADIENTS = frozenset((
    "backward_config", "delta", "dk", "dlse", "do", "dq", "dq_sum", "dv", "lse2",
))  # fmt: skip
KEYS_FIRST = frozenset(("acc", "l", "m"))
DECODING = frozenset(("fallbacks", "parts"))
#: What some schedule has, so that no input is called so where any may follow.
INTERFACE = READ | WITH_GRADIENTS | KEYS_FIRST | DECODING | {"schedule"}
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
    "ABOVE", "A_BY_ROWS", "BARRIERS", "BARRIERS_AT", "BLOCKS", "BOX", "BOXES", "B_BY_ROWS", "CONSUMERS",
    "COPY_REGISTERS", "EMPTY", "ENTRY_REGISTERS", "FULL", "Four", "HALF", "K_AT", "K_BYTES", "K_EMPTY",
    "K_FULL", "LANES", "LIMIT", "MAXIMA_AT", "MULTIPLY_REGISTERS", "No", "OVERLAP", "O_AT", "O_BYTES",
    "O_TILES", "PARTS", "PIECES", "P_AT", "P_FULL", "QK_PIECES", "Q_AT", "Q_BYTES", "Q_EMPTY", "Q_FULL",
    "Q_TILES", "RECORDS", "RECORDS_AT", "RECORD_EMPTY", "RECORD_FULL", "REST", "Record", "Ring",
    "SHARERS", "SUMS_AT", "TILES_END", "TensorMap", "VECTORS", "V_AT", "V_BYTES", "V_EMPTY", "V_FULL",
    "V_PIECES", "X_AT", "X_BYTES", "X_EMPTY", "X_FULL", "Yes", "accumulate", "again", "all_meet",
    "allow_next_launch", "arrivals", "arrives", "at_piece", "barrier", "barrier_of", "base", "batch",
    "begin", "boxes", "bytes", "claim", "clear_values", "consumer", "copy_tiles", "count_lanes", "drop",
    "end", "even", "exponent", "exponentials", "factor", "failed", "find_tiles", "finish", "finish_pv",
    "first_byte", "first_chunk", "first_p", "first_piece", "follows", "full", "given", "grows", "index",
    "is_partial", "joins", "k_map", "keep_four", "kind", "last_tile", "later", "leading", "leads",
    "least", "least_kept", "load_shared", "load_vectors", "may_be_partial", "mbarrier_arrive",
    "mbarrier_arrive_if", "mbarrier_expect", "mbarrier_fence", "mbarrier_init", "mbarrier_wait",
    "met_hi", "mine", "more", "most", "moves", "multiply_tiles", "next_p", "o_map", "o_row", "odd",
    "other_lo", "own", "page", "page_of", "parity", "pin", "pitch", "previous", "probabilities",
    "proxy_fence", "q_map", "q_rest", "q_row", "raise", "record", "records", "release", "release_k",
    "release_v", "rescale", "round_p", "row_maxima", "scale_rows", "sees", "settled", "sooner",
    "start_other", "start_pv", "start_qk", "step", "store_pieces", "store_shared", "threads",
    "tma_commit", "tma_load", "tma_prefetch", "tma_store", "tma_wait", "tma_wait_read", "u64",
    "uniform", "up", "v_map", "wait", "wait_for_launch", "warpgroup", "warpgroup_give_registers",
    "warpgroup_take_registers", "warpgroups_meet", "wgmma", "wgmma_commit", "wgmma_descriptor",
    "wgmma_fence", "wgmma_wait", "writes", "x0", "x1", "x2", "x3",
))  # fmt: skip
#: Every word that some kernel, or the declaration of a call, may have a use of its own for.
WORDS = KERNEL | DECLARED | CPP | CUDA_KERNEL | CUDA_BACKWARD | CUDA_HOPPER


def cannot_be_called(name: str) -> bool:
    """Whether a module cannot have a function of this name."""
    return iskeyword(name) or name in GLOBALS or name.startswith("_")


def cannot_be_passed(name: str, attention: Attention, schedule: Schedule) -> bool:
    """Whether the function of an attention cannot have an input of this name: one of its parameters, or a
    tensor of its own that kernels take, is called so.
    """
    if iskeyword(name) or name in READ or name.startswith("_"):
        return True
    own = {"schedule"} if schedule.label else set()
    if attention.grads:
        own |= WITH_GRADIENTS | {f"d{tensor}" for tensor in attention.grads}
    loops = knobs_of(schedule, "forward").get("loops")
    if loops is not None and ("kv", "q") in loops.choices:
        own |= KEYS_FIRST
    return name in (own | DECODING if is_decode(schedule) else own)


def _clashes(name: str) -> bool:
    """Whether a kernel may have another use for the name of a value, or of a size."""
    is_parameter = name.startswith(("_", "stride_")) or name.endswith("_ptr")
    return iskeyword(name) or is_parameter or name in WORDS


def own_name(name: str) -> str:
    """What a kernel calls a value of this name, whatever its target."""
    return f"{name.lstrip('_')}_value" if _clashes(name) else name


def own_sizes(names: Collection[str], inputs: Collection[str]) -> dict[str, str]:
    """What generated code calls the sizes that cannot keep their names, whatever the target: `t_size` for t.

    names: of all sizes that the spec chose; inputs: of its tensors, whose gradients have names too.
    """
    gradients = {f"d{name}" for name in inputs}
    values = tuple(f"{name}_" for name in gradients)
    found: dict[str, str] = {}
    taken = {*names, *inputs}
    for name in names:
        if _clashes(name) or name in gradients or name.startswith(values):
            plain = f"{name.strip('_')}_size"
            others = (f"{plain}_{i}" for i in count(2))
            fresh = next(free for free in chain((plain,), others) if free not in taken)
            found[name] = fresh
            taken.add(fresh)
    return found
