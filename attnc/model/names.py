"""Words with a fixed meaning, checks for names that a spec introduces, and the spellings of names from
Python, PyTorch and CUDA.

A name means one thing: nothing declared may reuse a reserved word or a name that is already taken in its
attention. Names of `def`s are looser: an attention's own names hide them, and a file may redefine a def
of the prelude. So are `SOFT` names and element types of 8 bits, which came to the language when specs were
already using them. What the functions of generated modules have or read (`INTERFACE`) is no name for an
input.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable, Mapping

from attnc.diagnostics import Label, Reporter, did_you_mean
from attnc.expr.functions import FUNCTIONS, REAL
from attnc.expr.nodes import INDICES
from attnc.model.dtypes import DType
from attnc.model.formulas import DEFS
from attnc.syntax import ast

#: What no expression of one query, one key and one head can say (docs/outside.md).
_NEIGHBOURS = "a score is of one query, one key and one head: it reads no other products"
#: Functions, and what to write in their place.
_FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(("pow", "power"), "write x * x for a square, exp2(y * log2(x)) for x to the power of y"),
    **dict.fromkeys(("if_else", "ifelse", "cond", "iif", "ternary"), "write where(condition, a, b)"),
    "masked_fill": "write where(condition, value, score); keys that none sees are left out by 'mask = ...'",
    **dict.fromkeys(("tril", "causal_mask", "is_causal", "lower_triangular"), "write causal"),
    **dict.fromkeys(("triu", "upper_triangular"), "write anticausal"),
    **dict.fromkeys(("dist", "distance"), "write abs(q_pos - kv_idx)"),
    **dict.fromkeys(
        ("any", "all"), "write 'or' or 'and' between conditions: each is of one query and one key"
    ),
    **dict.fromkeys(
        ("bitwise_and", "bitwise_or", "bitwise_xor", "popcount", "left_shift", "right_shift"),
        "of the bits of a word there is bit(word, i), a condition for each",
    ),
    **dict.fromkeys(
        ("arange", "iota", "program_id"), "positions are numbers: q_pos, q_idx, kv_idx, b, h and sizes"
    ),
    **dict.fromkeys(("maximum", "fmax"), "write 'max'"),
    **dict.fromkeys(("minimum", "fmin"), "write 'min'"),
    **dict.fromkeys(("fabs", "absolute"), "write 'abs'"),
    **dict.fromkeys(("clip", "clamp_"), "write clamp(x, lo, hi)"),
    **dict.fromkeys(
        ("floor", "ceil", "round", "trunc", "int"),
        "no float becomes an integer: divide integers with '//', or compare with each threshold",
    ),
    **dict.fromkeys(("sliding_window", "local", "local_window", "band"), "write window(left, right)"),
    **dict.fromkeys(("prefix", "prefixlm"), "write prefix_lm(length)"),
    **dict.fromkeys(("document", "documents", "same_document"), "write doc[b, q_pos] == doc[b, kv_idx]"),
    "alibi": "write slope[h] * (kv_idx - q_pos)",
    **dict.fromkeys(
        ("norm", "normalize", "l2norm", "rms_norm", "layer_norm", "cosine_similarity", "cos_sim", "cosine"),
        "normalize q and k before the call, or multiply dot(q, k) by what their norms make of it",
    ),
    "float": "an integer becomes a float where one is needed",
    "len": "lengths are sizes, such as N, and inputs, such as kv_len[b]",
    **dict.fromkeys(("sum", "mean", "cumsum"), "a score is of one query and one key: pass sums as an input"),
    **dict.fromkeys(
        ("conv", "conv1d", "conv2d", "convolve", "convolution", "shift", "roll"),
        f"{_NEIGHBOURS}, those of neighbours neither",
    ),
    **dict.fromkeys(
        ("talking_heads", "mix", "mix_heads", "head_mix", "over_heads"),
        f"{_NEIGHBOURS}, those of other heads neither",
    ),
    **dict.fromkeys(
        ("topk", "top_k", "argmax", "argsort", "sort", "select"),
        "choose keys before the call, and pass lists of them: mask = listed(idx, keys = 64)",
    ),
    **dict.fromkeys(
        ("scan", "cumprod", "cummax", "associative_scan", "recurrence"),
        "a spec has no state: pass what is accumulated along a sequence as an input",
    ),
    **dict.fromkeys(("rope", "rotary", "rotate", "apply_rope"), "rotate q and k before the call"),
    **dict.fromkeys(
        ("matmul", "mm", "bmm", "einsum", "inner"),
        "dot(q, k) is the one product: one of three tensors, or of others, cannot be said",
    ),
    **dict.fromkeys(
        ("cat", "concat", "concatenate", "hstack"),
        "in a product 'cat' joins k with columns behind it: dot(q, cat(k, rope[b, kv_idx, d]))",
    ),
    "softmax": "write 'normalize = softmax', a statement of its own",
    **dict.fromkeys(("rand", "random", "dropout"), "write softmax(dropout = p, seed = seed)"),
}
#: Values, indices and sizes, and what to write in their place.
_VALUES: Mapping[str, str] = {
    "score": "a weight alone reads the score, that of its own query, key and head",
    "True": "write 'true'",
    "False": "write 'false'",
    "None": "leave it out",
    **dict.fromkeys(("INF", "Inf", "infinity"), "write 'inf'"),
    **dict.fromkeys(
        ("i", "row", "query_idx", "query_pos"), "write 'q_pos', where the query stands among the keys"
    ),
    **dict.fromkeys(
        ("j", "col", "key_idx", "key_pos", "k_pos", "kv_pos"), "write 'kv_idx', where the key stands"
    ),
    **dict.fromkeys(("head", "head_idx", "h_idx", "q_head"), "write 'h', the query head"),
    **dict.fromkeys(("kv_head", "head_kv", "h_kv"), "write 'h // G', the K/V head"),
    **dict.fromkeys(("batch", "batch_idx", "batch_index"), "write 'b', the entry of the batch"),
    **dict.fromkeys(("head_dim", "head_size", "d_head", "d_k"), "write 'D', the columns of q and k"),
    **dict.fromkeys(("seqlen_q", "seq_len_q", "q_len", "len_q"), "write 'M', the number of queries"),
    **dict.fromkeys(
        ("seqlen_k", "seqlen_kv", "seq_len_k", "seq_len_kv", "len_k"), "write 'N', the number of keys"
    ),
    **dict.fromkeys(("seqlen", "seq_len", "sequence_length"), "write 'M' for queries, 'N' for keys"),
    **dict.fromkeys(("num_heads", "n_heads", "nheads"), "write 'H', the number of query heads"),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads", "num_key_value_heads"), "write 'Hkv'"),
}
#: What element types are called elsewhere.
_TYPE_OF = {theirs: ours for ours in DType for theirs in ours.facts.elsewhere.split()}


def called_here(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Returns the hint about a function that there is not: what is written for it, or what is close."""
    if name in DEFS:
        return (f"define it, in a line outside of the attention: {DEFS[name]}",)
    return (_FUNCTIONS[name],) if name in _FUNCTIONS else did_you_mean(name, known)


def value_here(name: str) -> tuple[str, ...]:
    """Returns the hint about a name without indices that has another one here."""
    written = _VALUES.get(name) or _FUNCTIONS.get(name)
    return (written,) if written else ()


def type_here(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Returns the hint about an element type that there is not."""
    return (f"write '{_TYPE_OF[name]}'",) if name in _TYPE_OF else did_you_mean(name, known)


#: Sizes with a fixed meaning. H, Hkv and G are read off the shapes of q and k; D and Dv are known at compile
#: time.
DIMS = ("B", "M", "N", "H", "Hkv", "G", "D", "Dv")
#: The dims that a `param` may fix; the others are run-time sizes.
PARAM_DIMS = ("H", "Hkv", "G", "D", "Dv")
INPUTS = ("q", "k", "v")
OUTPUTS = ("o", "lse")

#: Names of a spec become names in Python, where these mean something else.
PYTHON: Mapping[str, str] = (
    dict.fromkeys(keyword.kwlist, "a word of Python, which kernels are written in")
    | dict.fromkeys(("torch", "triton", "tl"), "a module that kernels import")
    | dict.fromkeys(("out", "config"), "an argument of every generated function")
)
#: Globals of a module and of the file beside the modules, whatever the target.
GLOBALS = frozenset((
    "Backward", "BACKWARD_CONFIGS", "BACKWARD_TUNED", "CALL", "Config", "CONFIGS", "CudaAttention",
    "Gradient", "GUESS", "HIGH", "HopperAttention", "Kernel", "Kernels", "LAZY", "LN2", "LOG2E", "LOW",
    "Made", "NamedTuple", "PARAMS", "Part", "PHI", "SCALE", "Split", "Tensor", "TmaKernels",
    "TritonAttention", "TUNED", "Tuned", "TWO_LOG2E", "VARIANTS",
))  # fmt: skip
#: What an attention cannot be called: its function would hide what its own module uses.
NOT_FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(GLOBALS, "a name in generated modules"),
    **dict.fromkeys(dir(builtins), "a name of Python's own"),
    **PYTHON,
}
#: What the function beside the modules reads, which takes their inputs and params too.
READ = frozenset(("CALL", "isinstance", "iter", "list", "next", "options", "ValueError", "VARIANTS"))
#: What the label of a schedule cannot be: it is the name of a module, which the file beside it imports.
NOT_LABELS: Mapping[str, str] = {
    **dict.fromkeys(READ, "a name in generated modules"),
    **NOT_FUNCTIONS,
    "default": "the module of an attention without params and labels",
}
#: Files that Windows does not have, whatever their endings: "Naming Files, Paths, and Namespaces" in its
#: documentation.
_DEVICES = frozenset(("aux", "con", "conin$", "conout$", "nul", "prn")) | {
    f"{port}{n}" for port in ("com", "lpt") for n in range(10)
}
#: Names that a spec may declare as something else: functions, and the constant `inf`.
SOFT = frozenset(
    {"bit", "clamp", "inf", *(name for name, function in REAL.items() if not function.is_reserved)}
)
#: `clamp(x, lo, hi)` is `min(max(x, lo), hi)`, and no function in the tree.
CLAMP_ARGUMENTS = 3
#: Every function of numbers that an expression may call, with its number of arguments.
CALLABLE: Mapping[str, int] = {**FUNCTIONS, "clamp": CLAMP_ARGUMENTS}
#: The condition of `model.lists`, which a def of this name hides.
LISTED = "listed"
#: What joins k, inside of a product, with columns of another input; and an example.
CAT, JOINED = "cat", "cat(k, rope[b, kv_idx, d])"
RESERVED: dict[str, str] = (
    dict.fromkeys(INDICES, "an index")
    | dict.fromkeys(DIMS, "a dimension")
    | dict.fromkeys((name for name in FUNCTIONS if name not in SOFT), "an intrinsic function")
    | dict.fromkeys((dtype for dtype in DType if dtype.facts.is_reserved), "an element type")
    | dict.fromkeys((*INPUTS, *OUTPUTS), "one of the tensors q, k, v, o, lse")
    | {"dot": "the product of q and k", "softmax": "a normalization"}
    | dict(PYTHON)
)
#: What generated functions take, or read, beside tensors and params.
OF_FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(READ, "a name in generated modules"),
    **dict.fromkeys(
        ("backward_config", "options", "schedule", "target"), "an argument of generated functions"
    ),
}
#: What a param cannot be called: it may become an argument of such a function.
NOT_PARAMS: Mapping[str, str] = {**OF_FUNCTIONS, **RESERVED}


def explain_reserved(name: str, reserved: Mapping[str, str], *, is_file: bool) -> str:
    """Returns why a name cannot be declared; "" if it can. is_file: files are called so."""
    if name in reserved:
        return f"always {reserved[name]}"
    if is_file and name.startswith("_"):
        return "names that begin with '_' are generated code's own"
    if is_file and name.lower() in _DEVICES:
        return "a device of Windows, which has no file of this name"
    return ""


def report_reserved(name: ast.Name, reason: str, report: Reporter) -> None:
    """Reports a name that cannot be declared."""
    report.error("E0202", f"'{name.id}' is reserved", name.span, reason, hints=("choose another name",))


class Taken:
    """The names declared so far in one scope, with the place of each declaration."""

    def __init__(self, report: Reporter) -> None:
        self._places: dict[str, ast.Name] = {}
        self._report = report

    def declare(
        self,
        name: ast.Name,
        allowed: tuple[str, ...] = (),
        reserved: Mapping[str, str] = RESERVED,
        *,
        is_file: bool = False,
    ) -> bool:
        """Takes a name, unless it is reserved (and not `allowed`) or already taken: then reports it and
        returns False. is_file: it becomes the name of a file, so that case alone tells no two apart.
        """
        if name.id not in allowed and (reason := explain_reserved(name.id, reserved, is_file=is_file)):
            report_reserved(name, reason, self._report)
            return False
        first = self._places.setdefault(name.id.lower() if is_file else name.id, name)
        if first is not name:
            message = f"'{name.id}' is defined twice"
            if first.id != name.id:
                message = f"'{first.id}' and '{name.id}' differ in case alone"
            self._report.error(
                "E0201",
                message,
                name.span,
                "second definition" if first.id == name.id else "many file systems have one file for both",
                related=(Label(first.span, "first definition"),),
            )
        return first is name


#: Parameters and tensors of a function with gradients, of one whose outer loop runs over keys, and of one
#: that decodes.
WITH_GRADIENTS = frozenset((
    "backward_config", "delta", "dk", "dk_sum", "dlse", "do", "dq", "dq_sum", "dv", "dv_sum", "lse2",
))  # fmt: skip
KEYS_FIRST = frozenset(("acc", "l", "m"))
DECODING = frozenset(("fallbacks", "lse_splits", "splits"))
#: Of one whose blocks take tiles from a counter.
TAKING_TILES = frozenset(("counter",))
#: What some schedule has, so that no input is called so where any may follow.
INTERFACE = READ | WITH_GRADIENTS | KEYS_FIRST | DECODING | TAKING_TILES | {"schedule"}
