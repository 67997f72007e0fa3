"""How templates are read, and the last touch on what they print: blank lines and long lines, as a careful
person would set them.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
from jinja2 import compiler
from jinja2.bccache import Bucket
from jinja2.ext import Extension

from attnc.resources import keep, kept_code, read_kept, resource
from attnc.target.quote import quote
from attnc.target.terms import factor, minus, modulo, over, plus, times


def template_environment(start: str = "{{", end: str = "}}") -> jinja2.Environment:
    """Templates by their path below templates/. start, end: what stands around a value.

    Nothing is escaped: the output is Python or C++. Code comes from printers alone, other text by way of
    `quote`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resource("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        variable_start_string=start,
        variable_end_string=end,
        autoescape=False,
        auto_reload=False,  # templates do not change while a process runs
        bytecode_cache=KeptTemplates(start),
    )
    environment.filters.update(quote=quote, lines=join_lines, each=fill_each)
    environment.filters.update(plus=plus, minus=minus, times=times, over=over, modulo=modulo, factor=factor)
    return environment


#: What a line ends with that a template prints from one value: where the value is empty, so is the line.
_VALUE = "\ue003"


class ValueLines(Extension):
    """Marks lines of templates that print one value, for `drop_empty_lines`."""

    value = re.compile(r"^([ \t]*\[\[(?:(?!\[\[|\]\]).)*\]\])[ \t]*$", re.MULTILINE)

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return self.value.sub(rf"\1{_VALUE}", source)


class OptionalLines(ValueLines):
    """The same of lines that print a list, or a value only if a condition holds."""

    value = re.compile(
        r"^([ \t]*\{\{(?!.* else )(?=.*(?:\| (?:lines|each)| if ))(?:(?!\{\{|\}\}).)*\}\})[ \t]*$",
        re.MULTILINE,
    )


class PythonTemplate(jinja2.Template):
    """A template of Python text."""

    def render(self, *args: Any, **fields: Any) -> str:
        return drop_empty_lines(super().render(*args, **fields))


def drop_empty_lines(text: str) -> str:
    """Returns the text of a template without the lines whose one value is empty."""
    if _VALUE not in text:
        return text
    kept = [line for line in text.split("\n") if _VALUE not in line or line.strip(f" \t{_VALUE}")]
    return "\n".join(kept).replace(_VALUE, "")


def join_lines(items: Iterable[Any], show: Callable[[Any], str] = str) -> str:
    """Returns a line for each item, as a template prints them; show: the text of one."""
    return "\n".join(map(show, items))


def fill_each(items: Iterable[object], form: str) -> str:
    """Returns a line for each item: the form, with the item, or all parts of a tuple, in its places `{}`."""
    return "\n".join(form.format(*item if isinstance(item, tuple) else (item,)) for item in items)


class KeptTemplates(jinja2.BytecodeCache):
    """Templates as Jinja has compiled them, which takes half of the time to compile a spec in a new process.

    One that was changed is compiled again, and so are all after a change of this package, whose filters Jinja
    may have applied already. Each is kept behind its SHA-256: what is damaged is compiled again. What cannot
    be read or written is compiled and not kept.
    """

    def __init__(self, start: str) -> None:
        self.start = start

    def load_bytecode(self, bucket: Bucket) -> None:
        code = read_kept(self.place(bucket), bucket.checksum)
        if code is not None:
            bucket.bytecode_from_string(code)

    def dump_bytecode(self, bucket: Bucket) -> None:
        keep(self.place(bucket), bucket.checksum, bucket.bytecode_to_string())

    def get_source_checksum(self, source: str) -> str:
        """Returns the hash of all that the code of a template follows from."""
        whole = f"{self.start}\0{_state_of_package()}\0{source}"
        return hashlib.sha256(whole.encode()).hexdigest()

    def place(self, bucket: Bucket) -> Path | None:
        return kept_code(__file__, f"{bucket.key}.jinja")


@cache
def _state_of_package() -> str:
    """Returns when the files of this package and Jinja's compiler were changed, and how long they are."""
    files = [Path(compiler.__file__), *sorted(Path(__file__).parent.rglob("*.py"))]
    states = ((path.name, path.stat()) for path in files)
    return " ".join(f"{name}:{state.st_mtime_ns}:{state.st_size}" for name, state in states)


@cache
def python_environment() -> jinja2.Environment:
    """Returns the environment of templates of Python text."""
    environment = template_environment()
    environment.add_extension(OptionalLines)
    environment.template_class = PythonTemplate
    environment.filters["quoted"] = _quote
    return environment


def _quote(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


WIDTH = 110
#: A statement around one expression, and what stands before and after the expression.
_STATEMENT = re.compile(r"(\w[\w, ]* = |return |if |elif |while )(.+?)(:?)")
_DOCSTRING = re.compile(r'\s*"""([^"]+)"""')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_STRING_ARGUMENT = re.compile(r'(\s*)((?:\w+=)?)"((?:[^"\\]|\\.)*)",\s*')
#: An argument that is given by its name.
_KEYWORD = re.compile(r"\w+=(?!=)")
#: A bracket of a call or a definition, where one more comma at the end changes nothing.
_CALL = re.compile(r"\w\(")


def tidy(text: str) -> str:
    """Returns two blank lines between definitions, at most one inside them, no trailing space, long lines
    wrapped.
    """
    text = trim_lines(text)
    text = "\n".join([line if len(line) <= WIDTH else wrap(line) for line in text.split("\n")])
    text = re.sub(r"\n{3,}(?=[ \t])", "\n\n", text)
    text = re.sub(r"\n{2,}(?=(@|def |class ))", "\n\n\n", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return text.strip("\n") + "\n"


def trim_lines(text: str) -> str:
    """Returns the text without spaces at the ends of its lines, but for one that no line follows."""
    *lines, last = text.split("\n")
    return "\n".join([*[line.rstrip(" \t") for line in lines], last])


def wrap(line: str, width: int = WIDTH) -> str:
    """Returns a statement that is too wide, broken inside its brackets, or a docstring of one line, as lines
    that are not; any other line as it is.

    A chain of operators gets a line per operand, a call or definition as many arguments per line as fit. A
    remark at the end goes in front.
    """
    indent = " " * (len(line) - len(line.lstrip()))
    if len(line) > width and (docstring := _DOCSTRING.fullmatch(line)) is not None:
        room = width - len(f'{indent}"""')
        words = textwrap.wrap(docstring[1], room, break_long_words=False, break_on_hyphens=False)
        return "\n".join(
            (f'{indent}"""{words[0]}', *(f"{indent}{text}" for text in words[1:]), f'{indent}"""')
        )
    if len(line) <= width or line.lstrip().startswith(('"""', 'f"', "raise")):
        return line
    if line.lstrip().startswith("# "):
        start = f"{indent}# "
        words = textwrap.wrap(
            line.strip()[2:], width - len(start), break_long_words=False, break_on_hyphens=False
        )
        return "\n".join(start + text for text in words)
    statement, remark, why = line.partition("  # ")
    if remark and statement.strip():
        return f"{wrap(f'{indent}# {why}', width)}\n{wrap(statement, width)}"
    chain = _chain(line.strip())
    if chain is not None:
        head, operands, tail = chain
        broken = _break_operands(operands, f"{indent}    ", width)
        return "\n".join((f"{indent}{head}(", *broken, f"{indent}){tail}"))
    code = _without_strings(line)
    calls = ((match.end() - 1, _matching(code, match.end() - 1)) for match in _CALL.finditer(code))
    opening, closing = max(calls, key=lambda call: call[1] - call[0], default=(-1, -1))
    if closing <= opening + 1:  # no call, or one without arguments
        return line
    lines = [line[: opening + 1], *_fill(line[opening + 1 : closing], f"{indent}    ", width)]
    return "\n".join((*lines, f"{indent}{line[closing:]}"))


#: An operator, "" before the first one, and what follows it.
_Operands: TypeAlias = list[tuple[str, str]]


def _chain(statement: str) -> tuple[str, _Operands, str] | None:
    """Returns `keep = a & b` as ("keep = ", [("", "a"), ("&", "b")], ""); None for anything else."""
    match = _STATEMENT.fullmatch(statement)
    if match is None:
        return None
    head, chain, tail = match.groups()
    if chain.startswith("not (") and _matching(_without_strings(chain), 4) == len(chain) - 1:
        head, chain = f"{head}not ", chain[5:-1]
    operands = _operands(chain)
    return (head, operands, tail) if len(operands) > 1 else None


def _operands(text: str) -> _Operands:
    """Returns the operands of the operators that bind least; the text alone where there is none."""
    for operator in (" or ", " and ", " <= ", " >= ", " < ", " > ", " == ", " != ", " | ", " & ", " + "):
        if operator in text:
            first, *others = split_outside_brackets(text, operator)
            if others:
                return [("", first), *((f"{operator.strip()} ", other) for other in others)]
    return [("", text)]


def _fill(arguments: str, indent: str, width: int) -> Iterator[str]:
    """Yields arguments, comma by comma, in lines of at most `width` where that can be."""
    current = indent
    for piece in split_outside_brackets(arguments.rstrip(", "), ", "):
        if current != indent and len(current) + len(piece) + 1 > width:
            yield current.rstrip()
            current = indent
        current += f"{piece}, "
        if current == f"{indent}{piece}, " and len(current) - 1 > width:  # alone, and still too long
            yield from _split_string(current, width) or _break_argument(current.rstrip(), width)
            current = indent
    if current != indent:
        yield current.rstrip()


def _break_argument(argument: str, width: int) -> list[str]:
    """Returns an argument that is too wide as lines: a sum or a condition operand by operand."""
    indent = argument[: len(argument) - len(argument.lstrip())]
    text = argument.strip().removesuffix(",")
    if _KEYWORD.match(text) or len(_operands(text)) == 1:
        return [wrap(argument, width)]
    *lines, last = _break_operands(_operands(text), indent, width)
    return [*lines, f"{last},"]


def _break_operands(operands: _Operands, indent: str, width: int) -> list[str]:
    """Returns part of an expression in brackets as lines: one for each operand, more where it is too wide."""
    lines = []
    for operator, operand in operands:
        first, *rest = _break_operand(operand, indent, width - len(operator))
        lines += [f"{indent}{operator}{first.lstrip()}", *rest]
    return lines


def _break_operand(text: str, indent: str, width: int) -> list[str]:
    if len(indent) + len(text) <= width:
        return [f"{indent}{text}"]
    operands = _operands(text)
    if len(operands) > 1:
        return _break_operands(operands, indent, width)
    if text.startswith("(") and _matching(_without_strings(text), 0) == len(text) - 1:
        return [f"{indent}(", *_break_operand(text[1:-1], f"{indent}    ", width), f"{indent})"]
    return [f"{indent}{text}"]


def _split_string(argument: str, width: int) -> list[str]:
    """Returns an argument that is a string, by name or not, as lines of several strings that are one; none
    for any other, or one that fits or has no blank.
    """
    match = _STRING_ARGUMENT.fullmatch(argument)
    if match is None:
        return []
    indent, name, text = match.groups()
    room, pieces = width - len(f'{indent}{name}("",'), [""]
    for word in re.split("(?= )", text):
        if pieces[-1] and len(pieces[-1]) + len(word) > room:
            pieces.append("")
        pieces[-1] += word
    first, *rest = (f'"{piece}"' for piece in pieces)
    if not rest:
        return []
    *middle, last = rest
    opening, closing = ("(", ")") if name else ("", "")
    lines = (f"{name}{opening}{first}", *middle, f"{last}{closing},")
    return [f"{indent}{line}" for line in lines]


def _without_strings(text: str) -> str:
    """Returns the text with blanks for what is in quotes: no bracket or comma there is one of code."""
    return _STRING.sub(lambda match: '"' + " " * (len(match[0]) - 2) + '"', text)


def split_outside_brackets(text: str, separator: str) -> Iterator[str]:
    """Yields the parts of a text between separators that stand outside all brackets and quotes."""
    depth = start = 0
    for match in _stops(separator).finditer(_without_strings(text)):
        found = match[0]
        if found != separator:
            depth += 1 if found in "([{" else -1
        elif depth == 0:
            yield text[start : match.start()]
            start = match.end()
    yield text[start:]


@cache
def _stops(separator: str) -> re.Pattern[str]:
    return re.compile(rf"[(\[{{}}\])]|{re.escape(separator)}")


def _matching(line: str, opening: int) -> int:
    depth = 0
    for at in range(max(opening, 0), len(line)):
        depth += (line[at] in "([{") - (line[at] in ")]}")
        if depth == 0 and at > opening:
            return at
    return -1
