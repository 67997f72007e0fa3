"""Names that generated modules use for themselves, and what becomes of a spec's names that clash with them.

In a kernel, a value that is loaded from an input then gets another name (`LoadNames`), and so does a size
(`own_sizes`). Inputs are names of the module's interface: what clashes there is refused (`check_lowerable`),
and that is a parameter or a tensor which the function really has. Attentions, labels and params are refused
where they are declared (`model.names`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cache
from itertools import chain, count
from keyword import iskeyword
from pathlib import Path

from attnc.expr.functions import REAL
from attnc.model.attention import Attention
from attnc.model.names import DECODING, KEYS_FIRST, READ, WITH_GRADIENTS
from attnc.model.schedule import Schedule
from attnc.resources import resource

#: Parameters and variables of kernels and of their steps, where values loaded from inputs have names too.
KERNEL = frozenset((
    "acc", "alpha", "at", "B", "b", "BLOCK_D", "BLOCK_M", "BLOCK_N", "BLOCK_S", "config", "D", "d", "DELTA",
    "delta", "delta_head", "delta_rows", "DK", "dk", "dlse_head", "DO", "do", "do_head", "dp", "DQ", "dq",
    "dq_at", "dq_head", "ds", "dsink_row", "EPSILON", "excess", "picked", "after", "left", "z",
    "DV", "Dv", "dv", "EARLY_DP", "exists", "first", "first_head",
    "first_pos", "first_row", "float", "full_hi", "full_lo", "G", "group", "H", "h", "h_kv", "head",
    "head_of_group", "head_tiles", "heads", "hides_some",
    "hi", "Hkv", "i", "j", "K", "k", "k_2", "k_end", "k_first", "keep", "keep_scale", "kept", "kept_hi",
    "kept_lo", "kv_hi",
    "kv_idx", "kv_lo", "kv_tiles", "bits",
    "bits_row", "block", "column", "count", "entries", "entry", "found", "lane", "line", "named", "place",
    "rest", "word", "words", "i_0", "i_1", "i_2", "i_3", "rest_1", "rest_2", "rest_3", "list_blocks",
    "list_entry", "list_item", "list_line", "list_row", "list_rows", "listed",
    "l", "l_new", "l_rows", "last", "last_pos", "later_page", "LAZY", "length",
    "LN2", "lo",
    "LOG2E", "lse", "LSE2", "lse2", "lse2_head", "lse2_rows", "lse_at", "lse_head", "lse_rows", "M", "m",
    "m_new", "M_padded", "m_rows", "m_tile", "MASKED", "N", "n", "next", "next_page", "O", "o", "o_at",
    "o_rows", "o_splits_ptr", "out", "p", "PAGE", "page", "partial", "Q", "q", "q_2", "q_at",
    "own_page", "PDL", "q_first", "q_head", "q_hi", "q_idx", "q_lo", "q_pos", "q_rows", "q_tiles", "range",
    "rank", "acc_all", "acc_split", "acc_splits_ptr", "first_segment", "l_all", "l_split", "m_all",
    "is_first_visited", "in_order",
    "m_sink", "m_split", "m_splits_ptr", "segment", "segment_hi", "segment_lo", "share", "share_all",
    "row", "row_lo", "row_tiles", "ROWS", "rows", "run", "s", "SCALE", "score", "SECTION", "section",
    "shift", "SPLIT", "split", "split_hi", "split_lo", "split_row", "SPLIT_ROWS", "split_size", "SPLIT_SIZE",
    "split_step", "SPLITS", "splits", "splits_ptr", "start", "stop", "tile",
    "third_page", "tiles", "tl", "TMA", "torch", "triton", "TWO_LOG2E", "V", "v", "weight", "zero",
    "ZERO_FILL",
    "again", "apart", "both", "chain", "head_lo", "high_before", "key_tiles", "listed_before", "low_before",
    "mark", "marks", "N_all", "padded", "places", "programs", "row_before", "start_before", "ticket",
    "tiles_before", "weight_rows", "weights", "wide",
    "dk_at", "dv_at", "dresult", "SPANS", "span_end", "span_first",
))  # fmt: skip
#: What the texts of a declared call mention besides sizes: configs, tiles, counts of programs and splits.
DECLARED = frozenset((
    "BLOCK_M", "BLOCK_N", "BLOCK_S", "config", "dk_config", "dkdv_config", "dq_config", "dq_floats",
    "dv_config", "EARLY_DP", "KEY_ROWS", "KV_SECTION", "M_padded", "PDL", "ROW_TILE", "rows", "rows_config",
    "SECTION", "shared", "SPLIT", "SPLIT_ROWS", "SPLIT_SIZE", "SPLITS", "STAGES", "tiles", "TMA", "WARPS",
    "EDGES", "HEAD_PARTS", "PLACES", "SPANS", "WALK_PARTS", "WALKS",
    "FIRST_HEAD", "HEAD_BYTES", "HEADS_AT_ONCE", "KEPT_HEADS", "LIST_TILES",
    "ROUND", "ROUND_HEADS", "ROUND_WALKS", "ROUNDS",
    "chunk", "copies", "key_tiles", "padded", "programs", "rounds", "sorting", "weights",
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
#: Names in CUDA kernels that no text of theirs has, since they are put together where it is filled in.
CUDA_MADE = frozenset((
    "A_BY_ROWS", "all_see_hi", "ask_for_k_scales", "ask_for_v_scales", "at_first",
    "at_first_2", "at_first_3", "at_first_4", "B_BY_ROWS",
    "convert_k", "convert_v", "copy_k", "copy_v",
    "dk_map", "do_map", "dq_map", "ds_place", "dv_map", "h_first", "in_call", "k_map",
    "K_SCALES", "K_SCALES_AT", "K_SCALES_OF_LANE", "k_x", "Keeps", "kv_start", "list_length",
    "load_k_scales", "load_v_scales", "look_up_k_rows", "look_up_v_rows", "lse_splits", "number", "o_map",
    "of_key", "of_key_2", "of_key_3", "of_key_4", "of_pair", "others", "part", "q_end", "q_from", "q_map",
    "q_to", "query_row", "query_rows", "RAW_END", "RAW_K_AT", "RAW_K_BYTES", "RAW_V_AT", "RAW_V_BYTES",
    "sequence", "store_k_scales", "store_v_scales", "swizzle", "total", "v_map", "V_SCALES", "V_SCALES_AT",
    "V_SCALES_OF_LANE", "v_x",
))  # fmt: skip
#: Columns of a tensor, of rows or of a gradient, that are a tile of their own, and extremes of a block.
_PART = re.compile(r"(?:d?[qkv]|rows|least|most)_\d+")
#: What a template fills in or leaves out, comments and strings; and a name that is no field of another.
_NOT_TEXT = re.compile(r'\[\[.*?\]\]|\{%.*?%\}|\{#.*?#\}|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
#: A statement among the strings that a template fills in.
_STATEMENT = re.compile(r'"((?:\\.|[^"\\\n])*;)(?:  //(?:\\.|[^"\\\n])*)?"')
_FILLED_IN = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[A-Za-z]\w*")


@cache
def words() -> frozenset[str]:
    """Returns every word that some kernel, or the declaration of a call, may have a use of its own for. Those
    of CUDA are read off the templates of kernels and the headers that they include.
    """
    texts = [path for folder in ("cuda", "sm90") for path in resource("templates", folder).glob("*.cu.jinja")]
    texts += (Path(__file__).parents[1] / "support").glob("*.cuh")
    found = (_words_of(path.read_text(encoding="utf-8")) for path in texts)
    return KERNEL | DECLARED | CPP | CUDA_MADE | frozenset(chain.from_iterable(found))


def _words_of(template: str) -> Iterator[str]:
    yield from _NAME.findall(_NOT_TEXT.sub(" ", template))
    for filled_in in _FILLED_IN.findall(template):
        for code in _STATEMENT.findall(filled_in):
            yield from _NAME.findall(code)


def cannot_be_passed(name: str, attention: Attention, schedule: Schedule) -> bool:
    """Returns whether the function of an attention cannot have an input of this name: one of its parameters,
    or a tensor of its own that kernels take, is called so.
    """
    if iskeyword(name) or name in READ or name.startswith("_"):
        return True
    own = {"schedule"} if schedule.label else set()
    if attention.grads:
        own |= WITH_GRADIENTS | {f"d{tensor}" for tensor in attention.grads}
    loops = schedule.forward.get("loops")
    if loops is not None and ("kv", "q") in loops.choices:
        own |= KEYS_FIRST
    return name in (own | DECODING if schedule.is_decode else own)


def _clashes(name: str) -> bool:
    is_parameter = name.startswith(("_", "stride_")) or name.endswith("_ptr")
    return iskeyword(name) or is_parameter or _PART.fullmatch(name) is not None or name in words()


def own_name(name: str, kind: str = "value") -> str:
    """Returns the name of this value in kernels of every target: `page_value` for `page`."""
    return f"{name.lstrip('_')}_{kind}" if _clashes(name) else name


def own_sizes(names: Collection[str], inputs: Collection[str]) -> dict[str, str]:
    """Returns the names, in generated code of every target, of sizes that cannot keep their own: `t_size` for
    t.

    names: of all sizes that the spec chose; inputs: of its tensors, whose gradients have names too.
    """
    gradients = {f"d{name}" for name in inputs}
    values = tuple(f"{name}_" for name in gradients)
    found: dict[str, str] = {}
    taken = {*names, *inputs}
    for name in names:
        if _clashes(name) or name.endswith("_map") or name in gradients or name.startswith(values):
            plain = f"{name.strip('_')}_size"
            others = (f"{plain}_{i}" for i in count(2))
            fresh = next(free for free in chain((plain,), others) if free not in taken)
            found[name] = fresh
            taken.add(fresh)
    return found
