"""Every code that a diagnostic may carry. A golden test in tests/golden/diagnostics shows each one.

E01xx syntax · E02xx names · E03xx types, shapes, roles · E04xx schedules · E05xx limits · E06xx resources,
targets · E09xx mods of FlexAttention · W07xx masks · W08xx schedules. A code is never reused for another
meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attnc.diagnostics.code import CodeInfo
from attnc.diagnostics.flex_codes import FLEX
from attnc.diagnostics.semantic_codes import SEMANTIC

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

_LIMITS = {
    "E0501": CodeInfo(
        "file that is too large",
        "A spec file has at most 256 KiB, 16384 lines, and as many words, numbers and signs.",
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
}

_ALL = _SYNTAX | SEMANTIC | _LIMITS | _RESOURCES | _PLAN_WARNINGS | FLEX

CODES: Mapping[str, CodeInfo] = MappingProxyType({code: _ALL[code] for code in sorted(_ALL)})
