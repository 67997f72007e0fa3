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
        "The statement does not follow the grammar. The label says what may stand at this place.",
    ),
    "E0103": CodeInfo(
        "bracket that is never closed",
        "Every '(', '[' and '{' needs a closing bracket. Newlines are ignored inside '(' and '[' but end a "
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
        "Indices (b, h, q_idx, q_pos, kv_idx), dimensions (B, M, N, H, Hkv, G, D, Dv), tensors (q, k, v, o, "
        "lse), element types and most intrinsics keep their meaning everywhere. A param may fix H, Hkv, G, "
        "D or Dv. Names of a spec become names in Python, so the keywords of Python cannot be used, nor "
        "'out' and 'config', which are arguments of every generated function. Attentions and labels also "
        "name files: their names cannot be those of builtins of Python or of devices of Windows ('con', "
        "'nul'), and cannot begin with '_'.",
    ),
    "E0203": CodeInfo(
        "unknown name",
        "An expression may use indices, dimensions, params, lets, inputs and defs. The body of a def may "
        "use its own parameters, indices, dimensions and other defs, and nothing else.",
    ),
    "E0204": CodeInfo(
        "unknown function",
        "The functions are the intrinsics (abs, min, max, clamp, where, and the functions of a real number "
        "in docs/language.md), dot(q, k), the defs of the prelude and the defs of the file.",
    ),
    "E0205": CodeInfo(
        "def that calls itself",
        "Defs are expanded where they are used, so they cannot be recursive, directly or through each other.",
    ),
    "E0206": CodeInfo(
        "wrong arguments",
        "A def takes as many arguments as it has parameters. An intrinsic takes as many as docs/language.md "
        "says. Arguments are given by position, without names.",
    ),
    "E0207": CodeInfo(
        "name used as what it is not",
        "A scalar is used by its name and a tensor with a subscript. q, k and v are used in dot(q, k) only. "
        "Only defs and intrinsics can be called.",
    ),
    "E0208": CodeInfo(
        "let that is used before it is defined",
        "Lets are read from top to bottom. Each may use those above it.",
    ),
    "E0209": CodeInfo(
        "unknown input",
        "Storage and 'grad' take names of inputs of the same attention.",
    ),
    "E0210": CodeInfo(
        "unknown attention",
        "A schedule belongs to an attention or a projection in the same file.",
    ),
    "E0211": CodeInfo(
        "unknown element type",
        "An element type is f16, bf16, f32, i32, i64, u8 or bool, and for k and v also e4m3, e5m2 or i8. It "
        "may be a param over such types: 'param T in {f16, bf16}'.",
    ),
    "E0212": CodeInfo(
        "unknown adjective of an input",
        "The storages are paged, ragged and prefix. The facts are sorted, distinct and descending, each "
        "along the last axis.",
    ),
    "E0213": CodeInfo(
        "unknown normalization or argument of it",
        "The normalizations are 'softmax', which may have the arguments sink, dropout, seed, first_head and "
        "v_scale; 'none', for weights that are not divided by their sum; 'softpick'; and 'stick_breaking'.",
    ),
    "W0201": CodeInfo(
        "name that is never used",
        "Nothing refers to this param, input or let. Most often it is a leftover.",
    ),
}

_TYPES = {
    "E0301": CodeInfo(
        "attention that is not complete",
        "Every attention has the inputs q, k and v, a score, a normalization and an output o.",
    ),
    "E0302": CodeInfo(
        "statement that is given twice",
        "An attention has one score, one mask, one normalization, and one length for each axis.",
    ),
    "E0303": CodeInfo(
        "operand of the wrong type",
        "'and', 'or' and 'not' take true or false; arithmetic and comparisons take numbers; '//', '%' and "
        "subscripts take integers. The only silent conversion is from an integer to a number.",
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
        "The only product is dot(q, k), and its place is the score. k may be multiplied in it, as in dot(q, "
        "k * scale), by a number for each column that is read from an input or is a power of two. cat(k, "
        "rest[b, kv_idx, d]) in place of k puts the columns of another input behind those of k. A mask "
        "depends on positions and inputs, never on scores: this lets the compiler skip tiles.",
    ),
    "E0307": CodeInfo(
        "choices of a param that do not fit together",
        "The choices of a param are element types of one kind, or numbers, or true and false, and each is "
        "listed once. Types of 8 bits may be mixed with floats. Sizes are positive integers.",
    ),
    "E0308": CodeInfo(
        "axis that is not a size",
        "An axis is a dimension, an integer param, a free name, a positive integer, or + - * // of these.",
    ),
    "E0309": CodeInfo(
        "axes that are not those of an attention",
        "q and o have a batch axis B, rows M, heads and a head dimension; k and v have rows N. The axes may "
        "be in any order, with the head dimension last. Ragged tensors have no batch axis, and the axis of "
        "their rows has a free name.",
    ),
    "E0310": CodeInfo(
        "head dimension that is not known at compile time",
        "The last axis of q, k, v and o is D, Dv, a param or a number from 1 to 1024.",
    ),
    "E0311": CodeInfo(
        "head dimensions that differ",
        "q and k have the same head dimension, D. If 'cat' puts other columns behind those of k, D counts "
        "both. The head dimension of v is Dv.",
    ),
    "E0312": CodeInfo(
        "heads that do not fit",
        "k and v have the same number of heads. The number of heads of q is a multiple of it, and the "
        "shapes show the factor: H and H, Hkv * G and Hkv, or G and 1. Query head h reads K/V head h // G.",
    ),
    "E0313": CodeInfo(
        "element type that does not fit",
        "q, k and v have one float type; o has a float type; lse is f32. If q is f16 or bf16, k and v may "
        "each have 8 bits instead: e4m3, e5m2 or i8. No other tensor can have one of these types.",
    ),
    "E0314": CodeInfo(
        "output that differs from its inputs",
        "o has the batch, rows and heads of q and the head dimension of v.",
    ),
    "E0315": CodeInfo(
        "fact that cannot hold",
        "Inputs other than q, k and v can have a fact about their last axis: integers can be sorted or "
        "distinct, and f32 can be descending.",
    ),
    "E0316": CodeInfo(
        "storage that does not fit",
        "The storages are 'k, v via paged(block_table, page = 16)' with 'block_table: i32[B, P]'; 'via "
        "ragged(cu)' with 'cu: i32[B + 1]'; and 'v via prefix(k)', where v has the rows of k. k and v are "
        "stored alike.",
    ),
    "E0317": CodeInfo(
        "argument of softmax that does not fit",
        "The sink is a number of a float type for each head. Dropout is one probability and needs a seed, "
        "an input 'i64[]'. The scale of v is a number that may depend on b, h, the query and the key. If it "
        "depends on the column d, it is read from an input or is a power of two, and query heads that share "
        "a K/V head share it.",
    ),
    "E0318": CodeInfo(
        "length that does not fit",
        "'length M' and 'length N' give the number of rows that exist in each sequence: an integer that "
        "depends on b. Paged keys need one, because the last page of a sequence may not be full.",
    ),
    "E0319": CodeInfo(
        "gradient that does not exist",
        "An input has a gradient if its elements are floats and the score, the sink or an epilogue reads "
        "it. Keys and values of 8 bits have none. In an attention with a scale of v or of columns of k, or "
        "with keys of two inputs, nothing has.",
    ),
    "E0320": CodeInfo(
        "division by zero",
        "This divisor is the constant 0.",
    ),
    "E0321": CodeInfo(
        "dimension that no shape determines",
        "The size of each dimension is computed from the shapes of the tensors that are passed in. So each "
        "dimension must be an axis of its own somewhere, or the only unknown in a sum or product.",
    ),
    "E0323": CodeInfo(
        "unknown output",
        "An attention has the outputs o and, if wanted, lse.",
    ),
    "E0324": CodeInfo(
        "epilogue that does not fit",
        "'output o: ... = ...' computes o from 'attention' (the normalised sum over the keys), b, h, the "
        "query, the column d and inputs. It cannot depend on a key.",
    ),
    "E0325": CodeInfo(
        "weight that does not fit",
        "Under 'normalize = none', 'weight = ...' computes the weight of a key from its score. All other "
        "normalizations define the weights themselves. A normalization without a denominator has no lse.",
    ),
    "E0330": CodeInfo(
        "projection that is not complete",
        "Every projection has inputs x and w, an output y and one equation.",
    ),
    "E0331": CodeInfo(
        "equation that is not one of a projection",
        "A projection computes y = dot(x, w), or y = dot(x, w) + bias[n] if it has a bias.",
    ),
    "E0332": CodeInfo(
        "tensor that does not fit its projection",
        "x is [M, K], w [N, K], bias [N] and y [M, N], all of one float type. M is a run-time size; N and K "
        "may be numbers or params.",
    ),
    "E0333": CodeInfo(
        "window that holds no key",
        "'window(left, right)' keeps the keys from q_pos - left to q_pos + right. In other libraries a "
        "negative number means no limit. Here a mask without a limit on one side is written without a "
        "window, as 'causal' is.",
    ),
    "E0334": CodeInfo(
        "list that cannot be read",
        "'listed(idx[b, h // G, q_idx // 64], keys = 64)' is a condition of a mask. It is true if an entry "
        "of that list is the number of the block of 64 keys that holds kv_idx. 'idx' is an input of "
        "integers, whose last axis holds the list. 'listed(idx, rows = 64, keys = 64)' leaves the other "
        "indices out: they follow from the sizes of the axes. 'count' says how many entries of each list "
        "are used.",
    ),
    "E0335": CodeInfo(
        "order that does not exist",
        "'order = absolute(2048)' sums keys in segments of 2048 that begin at multiples of 2048, and adds "
        "up the segments in order, under every schedule. The size is a number or a param, and a multiple of "
        "16. 'order = absolute' means 2048.",
    ),
}

_SCHEDULES = {
    "E0401": CodeInfo(
        "unknown target",
        "A schedule is for Triton or for one CUDA architecture.",
    ),
    "E0402": CodeInfo(
        "unknown key",
        "A schedule can have the keys that the note lists, and no others. No key is ignored.",
    ),
    "E0403": CodeInfo(
        "value that a key does not take",
        "The label lists the values that this key takes.",
    ),
    "E0404": CodeInfo(
        "key of another phase",
        "Keys that are not inside a phase belong to the forward kernel. 'accumulate' belongs in 'backward { "
        "... }'; 'split.kv' and 'softmax' belong to the forward kernel.",
    ),
    "E0405": CodeInfo(
        "key or value that is given twice",
        "A phase sets a key at most once, counting the 'when' blocks that hold for the same variant. A set "
        "lists a value at most once.",
    ),
    "E0406": CodeInfo(
        "unknown or nested phase",
        "The phases of an attention are forward, backward and combine; backward may hold dq and dkdv, one "
        "for each of its kernels. The phases of a projection are gemv and flat. A 'when' block holds no "
        "phases.",
    ),
    "E0407": CodeInfo(
        "condition that cannot be evaluated",
        "'where' compares keys, params, numbers and words: 'where tile.q <= tile.kv'. 'when' compares "
        "params, D, Dv and numbers; it cannot read keys.",
    ),
    "E0408": CodeInfo(
        "second schedule",
        "An attention has one schedule for a target, or several with labels ('as NAME'); a table by sizes "
        "then picks one for each call. A projection has one. To try other values of a key, give it a set of "
        "values.",
    ),
    "E0409": CodeInfo(
        "conditions that no config satisfies",
        "Together, the conditions exclude every combination of values.",
    ),
    "E0410": CodeInfo(
        "gradient that the attention does not have",
        "'accumulate.dk' says how the gradient of k is summed. The attention has to ask for that gradient.",
    ),
    "W0801": CodeInfo(
        "backward phase without gradients",
        "The attention has no 'grad' statement, so the backward phase is not used.",
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
        "Integers have 64 bits. An integer that is written, or is computed from constants, lies between "
        "-2^62 and 2^62, which leaves room for adding positions. Other constants are 'inf' or fit a "
        "float32. The same holds for the product of constant factors, and of constant divisors, of one "
        "term. Factors, and the reciprocals of divisors, stay below 2^127, also in the derivatives that "
        "'grad' needs. Constants must not be NaN.",
    ),
    "E0508": CodeInfo(
        "too many variants",
        "The choices of all params multiply to at most 1,024 variants of an attention. All schedules of a "
        "file together make at most 4,096 variants. `--no-limits` on the command line lifts this limit, and "
        "those of E0501, E0506, E0509 and E0510.",
    ),
    "E0509": CodeInfo(
        "too many configs",
        "The choices of all keys of a phase multiply to at most 4096 configs.",
    ),
    "E0510": CodeInfo(
        "file that is too much work",
        "A file can keep each of the other limits and still be too much work. Work is counted in steps; a "
        "step is about one operation of an expression that the compiler reads. An attention may cost "
        "500,000 steps, and so may each of its variants for one target. The whole file may cost 500,000 "
        "steps, plus 50,000 for each variant and target after the first. `--no-limits` on the command line "
        "lifts this limit.",
    ),
}


_FLEX = {
    "E0901": CodeInfo(
        "operation of a mod that no spec has",
        "Mods of FlexAttention are translated to specs. A spec can add, multiply, compare, read elements of "
        "tensors and call a few functions. docs/flex.md lists torch's operations one by one.",
    ),
    "E0902": CodeInfo(
        "mod that depends on a value",
        "A mod is called once, with symbols in place of the score and the positions, to find out what it "
        "computes. Symbols have no values, so a mod cannot branch on them or turn them into Python numbers.",
    ),
    "E0903": CodeInfo(
        "value of a mod that is neither a number nor a condition",
        "A mod computes with single numbers and conditions, or with short rows of a tensor. So it indexes "
        "every axis of a captured tensor, and returns one value.",
    ),
}

_LIMITS = {
    "E0501": CodeInfo(
        "file that is too large",
        "A spec file has at most 256 KiB, at most 32768 lines, and at most 32768 words, numbers and signs.",
    ),
    "E0502": CodeInfo(
        "expression or block that is nested too deeply",
        "Expressions and blocks have at most 64 levels. Each bracket, each sign, each 'not' and each "
        "arithmetic operator of a chain is a level. Name parts of the expression with 'let' or 'def'.",
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
        "Every config needs more shared memory or registers than a block can have on any GPU of this "
        "target. Smaller tiles, fewer stages or more warps need less.",
    ),
    "E0602": CodeInfo(
        "schedule that its target cannot compile",
        "The target cannot compile what the schedule asks for; the label is at the part that it cannot "
        "compile. Another key, loop order or target may work. No key is ignored.",
    ),
    "E0603": CodeInfo(
        "file of tuned choices that cannot be read",
        "'attnc tune' writes specs/tuned/<spec>.json, which holds the fastest config for each device and "
        "length. Without the file, the first config that fits is used.",
    ),
    "E0604": CodeInfo(
        "unified maximum with unsafe bounds",
        "Between the bounds, exp(s - phi) must neither overflow nor lose its digits. How far apart the "
        "bounds may be depends on the type of the probabilities.",
    ),
    "E0605": CodeInfo(
        "schedule that breaks the order of sums",
        "Under 'order = absolute(...)' all schedules of a target give a row the same bits. So all of them "
        "use tiles of the same shape, split the keys where segments begin, and keep a running maximum.",
    ),
}

_PLAN_WARNINGS = {
    "W0701": CodeInfo(
        "mask that is never true",
        "The mask keeps no element, whatever the sizes are: no row sees a key.",
    ),
    "W0702": CodeInfo(
        "mask under which no tile can be skipped",
        "Nothing in the mask bounds one index by the other, by a length or by a sorted input. So the kernel "
        "evaluates the mask for every element.",
    ),
    "W0703": CodeInfo(
        "rows that see nothing when M > N",
        "The last query is aligned with the last key. So if there are more queries than keys, the first "
        "queries come before the first key.",
    ),
    "W0704": CodeInfo(
        "condition of data for which no tile is skipped",
        "Tiles are skipped by bounds, which follow from positions, lengths and sorted inputs. A condition "
        "that is read element by element, such as a table of kept blocks, a tree, or documents that are not "
        "sorted, gives no bounds: the result is right, but no faster than without the condition. One case "
        "is faster: under 'loops = [q, kv]', kernels for Triton and Hopper find the blocks in which the "
        "mask keeps an element. For this, queries and keys must not be packed, and query heads that share "
        "keys must have the same mask.",
    ),
    "W0705": CodeInfo(
        "input that descends, and by which no tile is skipped",
        "If the score is r + c[b, h, q_pos] - c[b, h, kv_idx], and c is finite and never ascends, kernels "
        "can skip the first keys of a query: those whose weights, by the norms of q and k, add up to less "
        "than the rounding error. For this, r may read the key only in dot(q, k), multiplied by constants "
        "and passed through functions of bounded slope, and each query has to see the key at its own "
        "position.",
    ),
    "W0706": CodeInfo(
        "bits that a word does not have",
        "'bit(word, i % size)' reads 'size' bits of each word, and the type of the word has fewer: 8 of u8, "
        "32 of i32, 64 of i64. Of an i32, the bits above are its sign.",
    ),
    "W0802": CodeInfo(
        "gradients that are not generated",
        "The attention asks for gradients, but the schedule makes a forward kernel only. The callable "
        "refuses tensors that require a gradient.",
    ),
    "W0803": CodeInfo(
        "schedule for a target that is not compiled",
        "The schedule is checked but makes no file. The other schedules of the attention do.",
    ),
    "W0804": CodeInfo(
        "file that declares nothing",
        "A file of definitions compiles to nothing. A file that is compiled holds an attention or a "
        "projection, and schedules for it.",
    ),
    "W0805": CodeInfo(
        "key that gives up the fast kernels",
        "The schedule compiles as it is written, but this value of the key keeps it from the fastest "
        "instructions of its target.",
    ),
}

_ALL = _SYNTAX | _NAMES | _TYPES | _SCHEDULES | _LIMITS | _EXPANSION | _RESOURCES | _PLAN_WARNINGS | _FLEX

CODES: Mapping[str, CodeInfo] = MappingProxyType({code: _ALL[code] for code in sorted(_ALL)})
