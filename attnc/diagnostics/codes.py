"""Every code that a diagnostic may carry. A golden test in tests/golden/diagnostics shows each one.

E01xx syntax · E02xx names · E03xx types, shapes, roles · E04xx schedules · E05xx limits · E06xx resources,
targets · E09xx mods of FlexAttention · W07xx masks · W08xx schedules. A code is never reused for another
meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """`title` is a line; `explanation` states the rule, its reason and the fix."""

    title: str
    explanation: str


_SYNTAX = {
    "E0101": CodeInfo(
        "character that the language does not use",
        "A spec is written with letters, digits, '_' and the characters + - * / % < > = ! ( ) [ ] { } , : . "
        "and '#' for comments. There are no strings and no escapes.",
    ),
    "E0102": CodeInfo(
        "unexpected text",
        "The statement is not formed as the grammar asks; the label says what could stand there instead.",
    ),
    "E0103": CodeInfo(
        "bracket that is never closed",
        "Every '(', '[' and '{' needs its partner. Newlines are ignored inside '(' and '[' but end a "
        "statement inside '{'.",
    ),
    "E0104": CodeInfo(
        "closing bracket without an opening one",
        "A ')', ']' or '}' closes the bracket that was opened last, and that one must be of the same kind.",
    ),
    "E0105": CodeInfo(
        "file that is not UTF-8 text",
        "Specs are UTF-8. The place is the first byte that does not decode.",
    ),
    "E0106": CodeInfo(
        "operator of another language",
        "Masks are combined with 'and', 'or', 'not'; comparisons are == != < <= > >= and may be chained; "
        "arithmetic is + - * / // %. '=' defines and '==' compares.",
    ),
    "E0107": CodeInfo(
        "text outside of a definition",
        "At the top level a file holds 'attention', 'projection', 'schedule' and 'def', each at the start of "
        "a line.",
    ),
    "E0108": CodeInfo(
        "positional argument after a named one",
        "Arguments given by position come first, as in softmax(0, sink = sink[h]).",
    ),
}

_NAMES = {
    "E0201": CodeInfo(
        "name that is defined twice",
        "A name means one thing in an attention, and the names of attentions and defs are unique in "
        "a file, those of attentions without regard to case. Only the defs of the prelude may be redefined.",
    ),
    "E0202": CodeInfo(
        "reserved name",
        "Indices (b, h, q_idx, q_pos, kv_idx), dimensions (B, M, N, H, Hkv, G, D, Dv), tensors (q, "
        "k, v, o, lse), element types and most intrinsics keep their meaning everywhere. A param may fix "
        "H, Hkv, G, D or Dv. Names become names in Python too, so its words cannot be used, nor 'out' and "
        "'config', which every generated function takes. Attentions and labels become files: they cannot be "
        "called like a builtin of Python or a device of Windows ('con', 'nul'), nor begin with '_'.",
    ),
    "E0203": CodeInfo(
        "unknown name",
        "An expression may use indices, dimensions, params, lets, inputs and defs; the body of a "
        "def only its own parameters, indices, dimensions and other defs.",
    ),
    "E0204": CodeInfo(
        "unknown function",
        "Functions are the intrinsics (abs, min, max, clamp, where, and those of a real number that "
        "docs/language.md lists), dot(q, k), the defs of the prelude and those of the file.",
    ),
    "E0205": CodeInfo(
        "def that calls itself",
        "Defs are expanded where they are used, so they cannot be recursive, directly or through each other.",
    ),
    "E0206": CodeInfo(
        "wrong arguments",
        "A def takes as many arguments as it has parameters, an intrinsic as many as its formula; "
        "none are named.",
    ),
    "E0207": CodeInfo(
        "name used as what it is not",
        "Scalars are used by name, tensors with a subscript, q, k and v in dot(q, k) only, and only "
        "defs and intrinsics are called.",
    ),
    "E0208": CodeInfo(
        "let that is used before it is defined",
        "Lets are read from top to bottom, each using those above it.",
    ),
    "E0209": CodeInfo(
        "unknown input",
        "Storage and 'grad' name inputs of the same attention.",
    ),
    "E0210": CodeInfo(
        "unknown attention",
        "A schedule belongs to an attention or a projection in the same file.",
    ),
    "E0211": CodeInfo(
        "unknown element type",
        "Elements are f16, bf16, f32, i32, i64, u8 or bool, those of k and v also e4m3, e5m2 or i8; or a "
        "param over such types: 'param T in {f16, bf16}'.",
    ),
    "E0212": CodeInfo(
        "unknown adjective of an input",
        "Storage is paged, ragged or prefix; the one fact is 'sorted' (ascending along the last axis).",
    ),
    "E0213": CodeInfo(
        "unknown normalization or argument of it",
        "'normalize = softmax', or softmax with any of the arguments sink, dropout, seed, first_head and "
        "v_scale; 'normalize = none' where weights are not divided by their sum; 'normalize = softpick' or "
        "'stick_breaking'.",
    ),
    "W0201": CodeInfo(
        "name that is never used",
        "A param, input or let that nothing refers to, most often a leftover.",
    ),
}

_TYPES = {
    "E0301": CodeInfo(
        "attention that is not complete",
        "Every attention has inputs q, k and v, a score, a normalization and an output o.",
    ),
    "E0302": CodeInfo(
        "statement that is given twice",
        "One score, mask, normalization, and length of each axis.",
    ),
    "E0303": CodeInfo(
        "operand of the wrong type",
        "and, or and not take true or false; arithmetic and comparisons take numbers; // and % and "
        "subscripts take integers. Nothing is converted silently but an integer to a number.",
    ),
    "E0304": CodeInfo(
        "expression of the wrong type for its place",
        "A mask is true or false, a score is a number, a length is an integer.",
    ),
    "E0305": CodeInfo(
        "wrong number of indices",
        "A subscript has one index for each axis of the input.",
    ),
    "E0306": CodeInfo(
        "dot out of place",
        "dot(q, k) is the one product there is, or dot(q, k * scale) with a scale of columns of k, which is "
        "loaded, or a power of two; cat(k, rest[b, kv_idx, d]) in place of k has columns of another input "
        "behind those of k. The product belongs to the score. A mask depends on positions and inputs, never "
        "on scores: that is what lets the compiler skip tiles.",
    ),
    "E0307": CodeInfo(
        "choices of a param that do not fit together",
        "All choices are element types of one kind, or numbers, or true and false, each listed "
        "once; types of 8 bits stand beside floats as well. Sizes are positive integers.",
    ),
    "E0308": CodeInfo(
        "axis that is not a size",
        "An axis is a dimension, an integer param, a free name, a positive integer, or + - * // of these.",
    ),
    "E0309": CodeInfo(
        "axes that are not those of an attention",
        "q and o have a batch axis B, rows M, heads and a head dimension; k and v have rows N. Any "
        "order is a layout as long as the head dimension is last. Ragged tensors have no batch "
        "axis, and a free name for their rows.",
    ),
    "E0310": CodeInfo(
        "head dimension that is not known at compile time",
        "The last axis of q, k, v and o is D, Dv, a param or a number from 1 to 1024.",
    ),
    "E0311": CodeInfo(
        "head dimensions that differ",
        "q and k have the same head dimension, called D, or k and the columns that cat joins it with have it "
        "together; that of v is Dv.",
    ),
    "E0312": CodeInfo(
        "heads that do not fit",
        "k and v have the same heads, and q a multiple of them that the shape shows: H and H, Hkv * "
        "G and Hkv, or G and 1. Query head h reads K/V head h // G.",
    ),
    "E0313": CodeInfo(
        "element type that does not fit",
        "q, k and v have one float type; o has a float type; lse is f32. Beside q of f16 or bf16, k and v "
        "may each be of 8 bits instead: e4m3, e5m2 or i8. No other tensor is of these.",
    ),
    "E0314": CodeInfo(
        "output that differs from its inputs",
        "o has the batch, rows and heads of q and the head dimension of v.",
    ),
    "E0315": CodeInfo(
        "fact that cannot hold",
        "Along their last axis integer tensors can be sorted, or hold distinct numbers, and tensors of f32 "
        "be descending, but for q, k and v.",
    ),
    "E0316": CodeInfo(
        "storage that does not fit",
        "'k, v via paged(block_table, page = 16)' with 'block_table: i32[B, P]'; 'via ragged(cu)' "
        "with 'cu: i32[B + 1]'; 'v via prefix(k)', with the rows of k. k and v are stored alike.",
    ),
    "E0317": CodeInfo(
        "argument of softmax that does not fit",
        "The sink is a number for each head, of a float type; dropout is one probability and comes with a "
        "seed, an input 'i64[]'. The scale of v is a number of b, h, the query and the key; one that reads "
        "the column d is loaded, or a power of two, and the same for all query heads of a K/V head.",
    ),
    "E0318": CodeInfo(
        "length that does not fit",
        "'length M' and 'length N' replace the axis by an integer for each sequence: an expression "
        "of b. Paged keys need one, because the last page of a sequence is not full.",
    ),
    "E0319": CodeInfo(
        "gradient that does not exist",
        "Gradients are of float inputs that the score or the sink reads. Keys and values of 8 bits have "
        "none, and beside a scale of v nothing has.",
    ),
    "E0320": CodeInfo(
        "division by zero",
        "A divisor is the constant 0.",
    ),
    "E0321": CodeInfo(
        "dimension that no shape determines",
        "Each size is computed from the tensors passed in, so each must be alone in some axis, or "
        "the only unknown of a sum or product.",
    ),
    "E0323": CodeInfo(
        "unknown output",
        "An attention has the outputs o and, if wanted, lse.",
    ),
    "E0324": CodeInfo(
        "epilogue that does not fit",
        "'output o: ... = ...' says what o is: a number of 'attention' (the normalised sum over the keys), "
        "b, h, the query, the column d and inputs, not of the key.",
    ),
    "E0325": CodeInfo(
        "weight that does not fit",
        "'weight = ...', of the score, is what a key counts under 'normalize = none'. Other forms have "
        "weights of their own, and only a denominator has an lse.",
    ),
    "E0330": CodeInfo(
        "projection that is not complete",
        "Every projection has inputs x and w, an output y and one equation.",
    ),
    "E0331": CodeInfo(
        "equation that is not one of a projection",
        "A projection computes y = dot(x, w), or y = dot(x, w) + bias[n] where it has a bias.",
    ),
    "E0332": CodeInfo(
        "tensor that does not fit its projection",
        "x is [M, K], w [N, K], bias [N] and y [M, N], all of one float type. M is a run-time size; N and K "
        "may be numbers or params.",
    ),
    "E0333": CodeInfo(
        "window that holds no key",
        "'window(left, right)' keeps the keys from q_pos - left to q_pos + right. Elsewhere a negative "
        "number stands for no limit; here a side without one is left out, as in 'causal'.",
    ),
    "E0334": CodeInfo(
        "list that cannot be read",
        "'listed(idx[b, h // G, q_idx // 64], keys = 64)' is a condition of a mask: an entry of the list "
        "names the block of 64 keys that kv_idx is in. 'idx' is an input of integers, and the last of its "
        "axes the list. 'listed(idx, rows = 64, keys = 64)' finds the other indices by the sizes of the "
        "axes; 'count' is how many entries of each list count.",
    ),
    "E0335": CodeInfo(
        "order that does not exist",
        "'order = absolute(2048)' sums keys in segments of 2048, which begin at multiples of that, and joins "
        "segments in order, whatever the schedule. The size is a multiple of 16, a number or a param; "
        "'order = absolute' stands for 2048.",
    ),
}

_SCHEDULES = {
    "E0401": CodeInfo(
        "unknown target",
        "A schedule is for triton or for one CUDA architecture.",
    ),
    "E0402": CodeInfo(
        "unknown key",
        "The keys of a schedule are a closed set; nothing is ignored.",
    ),
    "E0403": CodeInfo(
        "value that a key does not take",
        "Each key takes the values that its message lists.",
    ),
    "E0404": CodeInfo(
        "key of another phase",
        "Keys outside of a phase belong to the forward kernel; 'accumulate' belongs to 'backward { "
        "... }', 'split.kv' and 'softmax' to the forward.",
    ),
    "E0405": CodeInfo(
        "key or value that is given twice",
        "A phase sets a key once, and so do the 'when' blocks that hold for one variant together; a set "
        "lists a value once.",
    ),
    "E0406": CodeInfo(
        "unknown or nested phase",
        "The phases are forward, backward and combine; backward holds dq and dkdv, its kernels. 'when' holds "
        "no blocks. A projection has gemv and flat.",
    ),
    "E0407": CodeInfo(
        "condition that cannot be evaluated",
        "'where' compares keys, params, numbers and words: 'where tile.q <= tile.kv'. 'when' has no keys.",
    ),
    "E0408": CodeInfo(
        "second schedule",
        "An attention has one schedule for a target, or several with labels ('as NAME'), among which a table "
        "by sizes picks; a projection has one. Sets of values express other alternatives.",
    ),
    "E0409": CodeInfo(
        "conditions that no config satisfies",
        "The conditions together exclude every combination of values.",
    ),
    "E0410": CodeInfo(
        "gradient that the attention does not have",
        "accumulate.dk says how the gradient of k is summed.",
    ),
    "W0801": CodeInfo(
        "backward phase without gradients",
        "The attention has no 'grad' statement, so the phase is not used.",
    ),
}

_EXPANSION = {
    "E0506": CodeInfo(
        "expression that expands too far",
        "Lets and defs are expanded where they are used; the result has at most 4096 operations and "
        "96 levels, and an attention expands at most 10000 calls.",
    ),
    "E0507": CodeInfo(
        "constant out of range",
        "Integers have 64 bits; those written, or computed from constants alone, lie between -2^62 and 2^62, "
        "so that sums with positions fit too. Other constants are 'inf' or fit a float32, also where several "
        "that multiply or divide the same are merged; factors and reciprocals of divisors stay below 2^127, "
        "and so do those of the derivatives that a 'grad' asks for. Constants that give NaN are refused.",
    ),
    "E0508": CodeInfo(
        "too many variants",
        "The choices of all params multiply to at most 1,024 variants of an attention. Those of all "
        "schedules of a file are at most 4,096. `--no-limits` on the command line lifts this limit, and "
        "those of E0501, E0506, E0509 and E0510.",
    ),
    "E0509": CodeInfo(
        "too many configs",
        "The choices of all keys of a phase multiply to at most 4096 configs.",
    ),
    "E0510": CodeInfo(
        "file that is too much work",
        "Each limit may be kept and all of them together still be too much: what a file costs is counted in "
        "steps, each about one operation of an expression that is looked at. An attention, and any variant "
        "of it for one target, may cost 500,000. A file may cost as many, and 50,000 for each variant and "
        "target after the first. `--no-limits` on the command line lifts this.",
    ),
}


_FLEX = {
    "E0901": CodeInfo(
        "operation of a mod that no spec has",
        "Mods of FlexAttention become specs, which add, multiply, compare, look up elements of tensors and "
        "call a few functions. docs/flex.md lists torch's operations one by one.",
    ),
    "E0902": CodeInfo(
        "mod that depends on a value",
        "A mod is called once, with symbols for its score and positions, to read what it computes. They have "
        "no values yet, so that it cannot branch on one or make a Python number of it.",
    ),
    "E0903": CodeInfo(
        "value of a mod that is no number or condition",
        "A mod computes with single numbers and conditions, or short rows of a tensor: every axis of a "
        "captured tensor is indexed, and what the mod returns is one value.",
    ),
}

_LIMITS = {
    "E0501": CodeInfo(
        "file that is too large",
        "A spec file has at most 256 KiB, 32768 lines, and as many words, numbers and signs.",
    ),
    "E0502": CodeInfo(
        "expression or block that is nested too deeply",
        "At most 64 levels. Each bracket, sign, 'not' and arithmetic operator of a chain counts as one; name "
        "a part of the expression with 'let' or 'def'.",
    ),
    "E0503": CodeInfo("number with too many digits", "A number has at most 32 digits."),
    "E0504": CodeInfo("name that is too long", "A name has at most 64 characters."),
    "E0505": CodeInfo(
        "number that is too large", "A number must fit a float64, that is, be at most about 1.8e308."
    ),
}

_RESOURCES = {
    "E0601": CodeInfo(
        "schedule of which no config fits",
        "Every config needs more shared memory or registers than one block can have on any GPU that the "
        "target covers. Smaller tiles, fewer stages or more warps need less.",
    ),
    "E0602": CodeInfo(
        "schedule that its target cannot compile",
        "Each target says what it cannot lower, at its place, and ignores nothing. Another key, loop order "
        "or target may do.",
    ),
    "E0603": CodeInfo(
        "file of tuned choices that cannot be read",
        "specs/tuned/<spec>.json is written by 'attnc tune' and holds the fastest config per device and "
        "length. Without the file the first config that fits is used.",
    ),
    "E0604": CodeInfo(
        "unified maximum with unsafe bounds",
        "exp(s - phi) must neither overflow nor lose its digits between the bounds: how wide they may be "
        "depends on the type of the probabilities.",
    ),
    "E0605": CodeInfo(
        "schedule that breaks the order of sums",
        "Under 'order = absolute(...)' a row has the same bits under every schedule of a target. So all of "
        "them multiply tiles of one shape, split keys where segments begin, and keep a running maximum.",
    ),
}

_PLAN_WARNINGS = {
    "W0701": CodeInfo(
        "mask that is never true",
        "The analysis proves that no element is kept, whatever the sizes: every row sees nothing.",
    ),
    "W0702": CodeInfo(
        "mask under which no tile can be skipped",
        "Nothing in the mask bounds one index by the other, by a length or by a sorted input, so the kernel "
        "evaluates it for every element.",
    ),
    "W0703": CodeInfo(
        "rows that see nothing when M > N",
        "Positions are aligned at the end: with more queries than keys the first rows stand before "
        "the first key.",
    ),
    "W0704": CodeInfo(
        "condition of data for which no tile is skipped",
        "Tiles are skipped by bounds that follow from positions, lengths and sorted inputs. What is looked "
        "up element by element, such as a list of kept blocks, a tree or the documents of an input that is "
        "not sorted, excludes elements and no tile: the result is right, and costs what it would without "
        "the condition. Kernels of Triton and Hopper with 'loops = [q, kv]' instead find the blocks in "
        "which the mask keeps a pair, if queries and keys are not packed and heads that share keys share it.",
    ),
    "W0705": CodeInfo(
        "input that descends, and by which no tile is skipped",
        "Of a score r + c[b, h, q_pos] - c[b, h, kv_idx], with c finite and never ascending, kernels leave "
        "out the first keys where the norms of q and k prove that all their weights together are below what "
        "rounding loses anyway. r may read the key in dot(q, k) alone, times constants and through functions "
        "of bounded slope, and each query has to see the key at its own position.",
    ),
    "W0802": CodeInfo(
        "gradients that are not generated",
        "The attention asks for gradients, and the compiler makes a forward kernel only: the callable "
        "refuses tensors that require a gradient.",
    ),
    "W0803": CodeInfo(
        "schedule for a target that is not compiled",
        "The schedule is checked but makes no file; the attention's other schedules do.",
    ),
    "W0804": CodeInfo(
        "file that declares nothing",
        "Definitions alone mean nothing to a compiler: a file holds an attention or a projection, and its "
        "schedules.",
    ),
    "W0805": CodeInfo(
        "key that gives up the fast kernels",
        "The schedule is compiled as it stands, and another value of the key would leave its target the "
        "instructions that it is for.",
    ),
}

_ALL = _SYNTAX | _NAMES | _TYPES | _SCHEDULES | _LIMITS | _EXPANSION | _RESOURCES | _PLAN_WARNINGS | _FLEX

CODES: Mapping[str, CodeInfo] = MappingProxyType({code: _ALL[code] for code in sorted(_ALL)})
