"""What an editor shows of a spec that is being written: messages, what a word means, which words can follow.

Everything is of a text in memory and its offsets, and knows no protocol; `attnc lsp` speaks that. A spec
that is half written gets what can be said of it, never an exception.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from attnc.build import plan_program, schedule_all
from attnc.diagnostics import Diagnostic, DiagnosticError
from attnc.effort import limit_steps
from attnc.expr.functions import FUNCTIONS
from attnc.expr.nodes import INDICES
from attnc.model.dtypes import DType
from attnc.model.knobs import KEYS
from attnc.model.names import DIMS, RESERVED
from attnc.model.resolve import resolve
from attnc.model.schedule import PHASES
from attnc.source import Source, Span
from attnc.syntax import ast
from attnc.syntax.format import format_file
from attnc.syntax.parser import parse, prelude

Kind: TypeAlias = Literal["keyword", "function", "variable", "type", "property", "value"]

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
_BLOCK = re.compile(r"^[ \t]*(attention|projection|schedule|def)\b[ \t]*([A-Za-z_]\w*)?", re.MULTILINE)
_DECLARED = re.compile(
    r"^[ \t]*(?:(param|let|length)[ \t]+(\w+)|(input|output)[ \t]+([\w, \t]+?)[ \t]*:)(.*)", re.MULTILINE
)
_PICTURED = (512, 512), (1, 512)
#: Variants of an attention that are planned while its text is written.
_FEW = 16

_STATEMENTS: Mapping[str, str] = {
    "param": "`param NAME in {a, b}`: a choice at compile time; the first is the default",
    "input": "`input NAMES: TYPE[sizes]`: arguments of the function, in this order",
    "let": "`let NAME = expression`: a named part, used by the lines below it",
    "length": "`length N = kv_len[b]`: the rows that exist in sequence `b`",
    "score": "`score = expression`: a number for each (query, key); there is no implicit scale",
    "mask": "`mask = condition`: true where a key is kept; all keys if left out",
    "normalize": "`softmax` (with `sink = ..., dropout = p` ...), `softpick`, `stick_breaking`, `none`",
    "order": "`order = absolute` or `absolute(1024)`: sums of so many keys each, joined in order",
    "weight": "`weight = expression` of `score`: what a key counts where `normalize = none`",
    "output": "`output o: ...`, with an epilogue `= ...` of `attention` or none, and `output lse: f32[...]`",
    "grad": "`grad NAMES`: inputs to differentiate by; `grad NAMES: f32` gives them in float32",
    "where": "`where condition`: configs that it does not hold for are left out",
    "config": "`config key = value, key in {a, b}`: configs said outright, one line or more",
    "when": "`when condition { ... }`: entries for the variants that it holds for (params, D, Dv)",
}
_OF_SCHEDULES = ("where", "config", "when")
_MEANINGS: Mapping[str, str] = {
    "b": "the sequence, 0 to B - 1",
    "h": "the query head, 0 to H - 1",
    "q_idx": "the row of q, 0 to M - 1: top-left aligned",
    "kv_idx": "the row of k and v, 0 to N - 1",
    "q_pos": "`q_idx + N - M`: the place of the query among the keys, the last at the last (bottom-right)",
    "B": "sequences",
    "M": "query rows; in expressions those of sequence `b`",
    "N": "key rows; in expressions those of sequence `b`",
    "H": "query heads",
    "Hkv": "K/V heads",
    "G": "query heads for each K/V head, H / Hkv",
    "D": "the last axis of q and k",
    "Dv": "the last axis of v and o",
    "dot": "`dot(q, k)`: the product of the query's row and the key's, summed in float32",
    "softmax": "the normalization; a row that sees no key has o = 0 and lse = -inf",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hover:
    """Markdown about a place, and the place."""

    text: str
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A word that can stand here; `detail` says what it is in a few words."""

    word: str
    kind: Kind
    detail: str = ""


@limit_steps()
def diagnose(source: Source) -> tuple[Diagnostic, ...]:
    """Returns the errors and warnings of a text, as `attnc check` prints them for a file. This runs at every
    keystroke, so it checks only the first variants of an attention that has many.
    """
    try:
        program, _ = schedule_all(resolve(parse(source), prelude()), most=_FEW)
        return plan_program(program, _FEW).warnings
    except DiagnosticError as failure:
        return failure.diagnostics


def format_text(source: Source) -> str | None:
    """Returns the text as `attnc fmt` writes it; None if it does not parse."""
    try:
        return format_file(parse(source))
    except DiagnosticError:
        return None


def hover(source: Source, offset: int) -> Hover | None:
    """Returns the meaning of the word at an offset; for a mask, an attention or a schedule the tiles that it
    visits.
    """
    word = _word_at(source, offset)
    if word is None or "#" in source.text[source.line_start(word.line) : word.start]:
        return None
    block = _block_at(source.text, word.start)
    pictured = word.text == "mask" or (block is not None and word.text in (block[1], block[0]))
    if pictured and (text := _tiles(source, block[1] if block else "")):
        return Hover(text=text, span=word)
    meaning = _meaning(source, word, block)
    return Hover(text=meaning, span=word) if meaning else None


def complete(source: Source, offset: int) -> tuple[Completion, ...]:
    """Returns words that can stand at an offset, those of the spec itself first."""
    line = source.text[source.line_start(source.position(offset)[0]) : offset]
    if "#" in line:
        return ()
    block = _block_at(source.text, offset)
    if block is None or not _is_open(source.text, block[2], offset):
        if not re.fullmatch(r"\s*\w*", line):
            return ()
        words = ("attention", "schedule", "projection", "def")
        return tuple(Completion(word=word, kind="keyword") for word in words)
    return tuple(
        _complete_schedule(line) if block[0] == "schedule" else _complete_attention(source, block, line)
    )


def _complete_schedule(line: str) -> Iterator[Completion]:
    setting = re.search(r"([\w.]+)\s*(?:=|in\s*\{)[^=]*$", line)
    if setting and "where" not in line and (setting.group(1) in KEYS):
        key = KEYS[setting.group(1)]
        values = key.words or (("true", "false") if key.kind == "bool" else ())
        yield from (Completion(word=word, kind="value", detail=key.allowed) for word in values)
        if not re.search(r",\s*[\w.]*$", line):
            return
    yield from (Completion(word=name, kind="property", detail=key.allowed) for name, key in KEYS.items())
    if re.fullmatch(r"\s*\w*", line):
        yield from (Completion(word=phase, kind="keyword") for phase in PHASES if phase != "forward")
        yield from (Completion(word=word, kind="keyword", detail=_STATEMENTS[word]) for word in _OF_SCHEDULES)


def _complete_attention(source: Source, block: tuple[str, str, int], line: str) -> Iterator[Completion]:
    if re.fullmatch(r"\s*\w*", line):
        yield from (
            Completion(word=word, kind="keyword", detail=detail)
            for word, detail in _STATEMENTS.items()
            if word not in _OF_SCHEDULES
        )
        return
    if re.search(r":\s*\w*$", line):
        yield from (Completion(word=str(dtype), kind="type") for dtype in DType)
        return
    for name, written in _find_declared(source.text, block[2]).items():
        yield Completion(word=name, kind="variable", detail=written)
    for name, definition in _defs(source).items():
        yield Completion(word=name, kind="function", detail=definition)
    yield from (Completion(word=name, kind="variable", detail=_MEANINGS[name]) for name in INDICES)
    yield from (Completion(word=name, kind="variable", detail=_MEANINGS[name]) for name in DIMS)
    yield from (Completion(word=name, kind="function") for name in (*FUNCTIONS, "dot", "softmax"))
    yield from (Completion(word=word, kind="keyword") for word in ("and", "or", "not", "via", "is", "in"))


def _meaning(source: Source, word: Span, block: tuple[str, str, int] | None) -> str:
    name = word.text
    before = source.text[source.line_start(word.line) : word.start]
    if name in KEYS and block is not None and block[0] == "schedule":
        key = KEYS[name]
        return f"**{name}** = {key.allowed}\n\nin {', '.join(key.phases)}"
    if name in _STATEMENTS and not before.strip():
        return _STATEMENTS[name]
    if block is not None and (written := _find_declared(source.text, block[2]).get(name)):
        return f"```attn\n{written}\n```"
    if definition := _defs(source).get(name):
        return f"```attn\n{definition}\n```"
    if name in _MEANINGS:
        return f"**{name}**: {_MEANINGS[name]}"
    return f"**{name}**: {RESERVED[name]}" if name in RESERVED else ""


def _tiles(source: Source, name: str) -> str:
    from attnc.explain.forward import tiles_of
    from attnc.plan.picture import FULL, PARTIAL, SKIP, picture

    try:
        modules = plan_program(resolve(parse(source), prelude()), _FEW).modules
    except DiagnosticError:
        return ""
    module = next((module for module in modules if module.variant.attention.name == name), None)
    if module is None:
        return ""
    kernel = module.kernel
    queries, keys = _PICTURED[kernel.structure == "decode"]
    drawn = picture(kernel, queries, keys, *tiles_of(kernel.configs[0]))
    note = f" ({drawn.note})" if drawn.note else ""
    counts = f"{drawn.count(SKIP)} skipped, {drawn.count(PARTIAL)} partial, {drawn.count(FULL)} full"
    rows = "\n".join(drawn.rows)
    return (
        f"**{name}** {module.variant.name}, tiles of {drawn.tile_q} x {drawn.tile_kv}"
        f" at M = {queries}, N = {keys}{note}: {counts} of {drawn.tiles}\n\n"
        f"```text\n{rows}\n```\n\n`{SKIP}` skipped, `{PARTIAL}` partial, `{FULL}` full;"
        " q downwards, kv to the right"
    )


def _find_declared(text: str, start: int) -> dict[str, str]:
    """Returns names that the block at `start` declares, with the line that does; of texts that do not parse,
    too.
    """
    following = _BLOCK.search(text, start + 1)
    found: dict[str, str] = {}
    for match in _DECLARED.finditer(text, start, following.start() if following else len(text)):
        line = match.group().partition("#")[0].strip()
        names = match.group(2) or match.group(4)
        found |= dict.fromkeys((name.strip() for name in names.split(",") if name.strip()), line)
    return {name: line for name, line in found.items() if name not in DIMS or line.startswith("param")}


def _defs(source: Source) -> dict[str, str]:
    try:
        own = parse(source).items
    except DiagnosticError:
        own = ()
    items = (*prelude().items, *own)
    return {item.name.id: item.span.text.strip() for item in items if isinstance(item, ast.Def)}


def _word_at(source: Source, offset: int) -> Span | None:
    line = source.position(offset)[0]
    start = source.line_start(line)
    for match in _WORD.finditer(source.line_text(line)):
        if start + match.start() <= offset <= start + match.end():
            return source.span(start + match.start(), start + match.end())
    return None


def _block_at(text: str, offset: int) -> tuple[str, str, int] | None:
    end = text.find("\n", offset)
    last = None
    for match in _BLOCK.finditer(text, 0, len(text) if end < 0 else end):
        last = match
    return None if last is None else (last.group(1), last.group(2) or "", last.start())


def _is_open(text: str, start: int, offset: int) -> bool:
    """Returns whether the block that starts at `start` has not ended before the offset; a def ends with its
    line, but for what stands in parentheses.
    """
    code = re.sub(r"#[^\n]*", "", text[start:offset]).lstrip()
    if code.startswith("def"):
        return "=" in code and ("\n" not in code or code.count("(") > code.count(")"))
    return code.count("{") > code.count("}")
