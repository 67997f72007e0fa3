"""`hostile_file(seed)`: a spec file that means no good, always the same one for a number.

Committed specs with their words changed, payloads for every target language and for terminals in comments,
names and paths, nesting and sums and definitions up to the limits, many attentions, params and schedules, and bytes
that are no text.
"""

# ruff: noqa: E501 - tables of payloads

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("specs", "tests/syntax/examples", "tests/model/examples", "tests/golden/diagnostics")
    for path in (ROOT / folder).glob("*.attn")
)
#: Stands in every payload: it may be found in comments and literals, and nowhere else in generated text.
MARK = "DANGER"
PAYLOADS = (
    f"\n#define {MARK}(a) system(a)", f'"""\nimport os; {MARK}()\n"""', f"'''{MARK}'''", f"*/ int {MARK}; /*", f"{MARK} \\",
    f"{MARK} ??/", f"\r{MARK}()", f"\x0c{MARK}", f"\x0b{MARK}", f"\x85{MARK}", f"\u2028{MARK}", f"\u2029{MARK}", f"\x1c{MARK}",
    f"\x1b[2J\x1b]0;{MARK}\x07", f"\u202e{MARK}\u2066", f"{{{{ {MARK} }}}}", f"{{% set {MARK} = 1 %}}", f"{{# {MARK} #}}",
    f"[[ {MARK} ]]", f"\\N{{{MARK}}}", f"\\x4{MARK}", f"\n#include <{MARK}>", f'"; {MARK}; "', f"' + {MARK} + '", f"$({MARK})",
    f"`{MARK}`", f"[/{MARK}]", f"[bold]{MARK}", f"coding: {MARK}", f"\x00{MARK}", f"\ufeff{MARK}", f"\\\n{MARK}();",
    f"_Pragma({MARK})", f"<%{MARK}%>", f"%:define {MARK}", f"%s{MARK}%(x)d", f"{{0.{MARK}}}", f"U+202E {MARK}", f"LN2 SCALE _tanh {MARK}",
)  # fmt: skip
NAMES = (
    "import", "main", "int", "float", "asm", "args", "Args", "tl", "torch", "INF", "LN2", "SCALE", "acc", "alpha", "p", "s", "m",
    "l", "keep", "block", "self", "lambda", "None", "__import__", "__init__", "_", "__", "o_ptr", "stride_qm", "BLOCK_M", "D",
    "template", "typename", "u32", "element", "threadIdx", "printf", "key", "options", "config", "PARAMS", "VARIANTS", "TUNED",
    "Config", "default", "triton", "ast", "functools", "extern", "__LINE__", "defined", "page", "split", "x" * 64, "x" * 65,
)  # fmt: skip
NUMBERS = (
    "0", "1", "2", "3", "7", "16", "31", "64", "1024", "1025", "2147483647", "2147483648", "4611686018427387903", "9" * 32,
    "9" * 33, "0.5", "1e-30", "1e30", "3.5e38", "1e308", "1e309", "00", "1e5",
)  # fmt: skip
_TOKEN = re.compile(
    r"\s+|#[^\n]*|[A-Za-z_][\w.]*|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|[<>=!]=|//|.", re.DOTALL
)
_WORD = re.compile(r"[A-Za-z_0-9]")
_NAME = re.compile(r"[A-Za-z_]\w*")

HEAD = "  input q: f16[B, M, H, 64]\n  input k, v: f16[B, N, H, 64]\n"
TAIL = "  normalize = softmax\n  output o: f16[B, M, H, 64]\n"


@dataclass(frozen=True, slots=True)
class HostileFile:
    """kind: the strategy that made it; name: of the file, which may hold any character but '/' and NUL."""

    kind: str
    name: str
    data: bytes


def hostile_file(seed: int) -> HostileFile:
    """The file of this number."""
    draw = random.Random(seed)
    kind = draw.choices(list(_KINDS), weights=[weight for _, weight in _KINDS.values()])[0]
    made = _KINDS[kind][0](draw)
    data = made if isinstance(made, bytes) else made.encode("utf-8", errors="surrogatepass")
    if draw.random() < 0.1:
        data = _damaged(draw, data)
    return HostileFile(kind, _file_name(draw), data)


def _file_name(draw: random.Random) -> str:
    if draw.random() < 0.6:
        return "spec.attn"
    payload = draw.choice(PAYLOADS).replace("/", "-").replace("\0", "")
    stem = draw.choice(
        (
            payload,
            f"a{payload}b",
            "x" * 240,
            "-v",
            "--help",
            " ",
            ".",
            "spec\udcff\udc80",
            "é漢",
            "LN2 _tanh",
            "*",
        )
    )
    name = f"{stem}.attn"
    while len(os.fsencode(name)) > 255:
        name = name[1:]
    return name


def _damaged(draw: random.Random, data: bytes) -> bytes:
    match draw.randrange(8):
        case 0:
            return data.replace(b"\n", b"\r\n")
        case 1:
            return data.replace(b"\n", b"\r")
        case 2:
            return b"\xef\xbb\xbf" + data
        case 3:
            return data[: draw.randrange(len(data) + 1)]
        case 4:
            at = draw.randrange(len(data) + 1)
            return data[:at] + draw.randbytes(draw.randrange(1, 9)) + data[at:]
        case 5:
            return data.decode("utf-8", "replace").encode("utf-16")
        case 6:
            return data.replace(b" ", b"\t")
        case _:
            return data + data


# --- kinds --------------------------------------------------------------------------------------------------


def _source(draw: random.Random) -> str:
    return draw.choice(SOURCES).read_text(encoding="utf-8", errors="replace")


def _mutated(draw: random.Random) -> str:
    tokens = _TOKEN.findall(_source(draw))
    places = [at for at, token in enumerate(tokens) if _WORD.match(token)] or [0]
    others = [token for token in _TOKEN.findall(_source(draw)) if not token.isspace()]
    for _ in range(draw.randrange(1, 7)):
        i, j = draw.choice(places), draw.choice(places)
        match draw.randrange(6):
            case 0 | 1:
                tokens[i] = draw.choice(others)
            case 2:
                tokens[i] = draw.choice(NUMBERS)
            case 3:
                tokens[i] = ""
            case 4:
                tokens[i] += f" {tokens[i]}"
            case _:
                tokens[i], tokens[j] = tokens[j], tokens[i]
    return "".join(tokens)


def _commented(draw: random.Random) -> str:
    """Payloads in comments: at the ends of lines, and between the words of expressions spread over lines."""
    lines = []
    for line in _source(draw).split("\n"):
        head, equals, value = line.split("#")[0].partition(" = ")
        spreads = re.fullmatch(r"\s*(score|mask|let \w+|length \w|def .*)", head) and draw.random() < 0.6
        if equals and spreads and "{" not in value and value.count("(") == value.count(")"):
            words = (f"{word}  # {draw.choice(PAYLOADS)}" for word in value.split())
            joined = "\n    ".join(word.replace("\n", "\n#") for word in words)
            lines.append(f"{head} = (  # {MARK}\n    {joined}\n  )")
        elif draw.random() < 0.3:
            lines.append(f"{line.split('#')[0]}  # {draw.choice(PAYLOADS)}".replace("\n", "\n# "))
        else:
            lines.append(line)
    return "\n".join(lines)


def _injected(draw: random.Random) -> str:
    """Payloads anywhere."""
    text = _source(draw)
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice(PAYLOADS) + text[at:]
    return text


def _renamed(draw: random.Random) -> str:
    """A name of the spec becomes another one throughout."""
    text = _source(draw)
    for _ in range(draw.randrange(1, 3)):
        old, new = draw.choice(sorted(set(_NAME.findall(text))) or ["x"]), draw.choice(NAMES)
        text = re.sub(rf"\b{re.escape(old)}\b", new, text)
    return text


def _attention(
    body: str, name: str = "a", targets: tuple[str, ...] = ("triton",), knobs: str = "tile.q = 64"
) -> str:
    schedules = "".join(f"schedule {name} for {target} {{ {knobs} }}\n" for target in targets)
    return f"attention {name} {{\n{HEAD}{body}{TAIL}}}\n{schedules}"


def _targets(draw: random.Random) -> tuple[str, ...]:
    return draw.choice((("triton",), ("cuda.sm_80",), ("triton", "cuda.sm_80"), ()))


def _size(draw: random.Random, most: int) -> int:
    """Small numbers as often as large ones."""
    return max(1, int(most ** draw.random()))


_BOOLS = ("kv_idx <= q_pos", "kv_idx != q_pos - {n}", "kv_idx % {n} == q_idx % 3", "abs(q_pos - kv_idx) < {n}",
          "q_pos // {n} == kv_idx // {n}", "h < {n}", "x[kv_idx] == x[q_idx]", "y[b, kv_idx] > {n}", "z[b, kv_idx] <= z[b, q_pos]",
          "min(kv_idx, {n}) < max(q_idx, kv_idx)", "where(h < {n}, kv_idx, q_idx) > {n}", "u[kv_idx] < u[q_idx] * {n}")  # fmt: skip
_FLOATS = ("dot(q, k)", "1.5", "u[kv_idx]", "u[q_idx] * {n}", "exp(u[h] / {n})", "tanh(dot(q, k))", "abs(q_pos - kv_idx)",
           "log(1 + abs(u[kv_idx - q_idx]))", "max(u[h], dot(q, k))", "where(kv_idx < {n}, u[q_idx], 2.0)", "dot(q, k) * u[kv_idx]")  # fmt: skip
_INTS = (
    "kv_idx",
    "q_idx",
    "q_pos",
    "h",
    "b",
    "N",
    "M",
    "{n}",
    "x[kv_idx]",
    "y[b, kv_idx]",
    "z[b, q_pos]",
    "abs(q_pos - kv_idx)",
)
_INPUTS = "  input x: i32[N]\n  input y: i32[B, N]\n  input z: i32[B, N] is sorted\n  input u: f32[N]\n"


def _leaf(draw: random.Random, leaves: tuple[str, ...]) -> str:
    return draw.choice(leaves).replace("{n}", str(draw.randrange(1, 200)))


def _tree(draw: random.Random, leaves: tuple[str, ...], depth: int) -> str:
    """An expression of the kind of its leaves, nested so deep."""
    if depth == 0:
        return _leaf(draw, leaves)
    one, two = _tree(draw, leaves, depth - 1), _tree(draw, leaves, depth - 1 if draw.random() < 0.4 else 0)
    return draw.choice(_FORMS[leaves]).replace("{}", one, 1).replace("{}", two, 1)


_FORMS: dict[tuple[str, ...], tuple[str, ...]] = {
    _BOOLS: ("{} and {}", "{} or {}", "not ({} and {})", "where({}, {}, true)", "({} or {})", "({} and {})"),
    _INTS: ("({} + {})", "({} - {})", "min({}, {})", "max({}, {})", "({}) // 7 + {}", "({}) % 5 + {}", "where({} < {}, 1, kv_idx)"),
    _FLOATS: ("({} + {})", "({} - {})", "({} * {})", "max({}, {})", "where({} < {}, 1.0, 2.5)", "({} / (2 + abs({})))", "tanh({}) + {}"),
}  # fmt: skip


def _deep(draw: random.Random) -> str:
    depth = draw.randrange(1, 16)
    mask = _tree(draw, _BOOLS, depth) if draw.random() < 0.6 else f"{_tree(draw, _INTS, depth)} <= q_pos"
    score = _tree(draw, _FLOATS, draw.randrange(0, 12))
    grads = draw.choice(("", "  grad q, k, v\n", "  grad q, u\n"))
    return _attention(
        f"{_INPUTS}  score = dot(q, k) + {score}\n  mask = {mask}\n{grads}", targets=_targets(draw)
    )


def _long(draw: random.Random) -> str:
    """Chains of one operator."""
    count = _size(draw, 2500)
    kind, joint = draw.choice(
        (
            (_BOOLS, " and "),
            (_BOOLS, " or "),
            (_FLOATS, " + "),
            (_INTS, " + "),
            (_INTS, " < "),
            (_BOOLS, None),
        )
    )
    leaves = [_leaf(draw, kind) for _ in range(count)]
    if draw.random() < 0.3:
        leaves = leaves[:1] * count
    if joint is None:
        chain = " or ".join(" and ".join(leaves[at : at + 3]) for at in range(0, count, 3))
    else:
        if joint == " + " and draw.random() < 0.8:  # in groups, since one chain leans left, a level for each
            leaves = [f"({' + '.join(leaves[at : at + 50])})" for at in range(0, count, 50)]
        chain = joint.join(leaves)
    score = f"dot(q, k) + {chain}" if kind is _FLOATS else "dot(q, k)"
    mask = "causal" if kind is _FLOATS else f"({chain}) <= q_pos" if joint == " + " else chain
    grads = draw.choice(("", "", "  grad q, k, v, u\n"))
    return _attention(f"{_INPUTS}  score = {score}\n  mask = {mask}\n{grads}", targets=_targets(draw))


def _exploding(draw: random.Random) -> str:
    """Lets and defs, each of which uses the one before twice."""
    levels = _size(draw, 40)
    kind, form = draw.choice(
        (
            (_BOOLS, "{} and not {}"),
            (_BOOLS, "{} or {}"),
            (_INTS, "{} + {}"),
            (_INTS, "min({}, {} + 1)"),
            (_FLOATS, "{} * {}"),
        )
    )
    leaf = _leaf(draw, kind)
    if draw.random() < 0.5:
        steps = [f"  let e0 = {leaf}\n"] + [
            f"  let e{n} = {form.format(f'e{n - 1}', f'e{n - 1}')}\n" for n in range(1, levels)
        ]
        head, body = "", "".join(steps)
        last = f"e{levels - 1}"
    else:
        leaf = "kv_idx <= q_pos" if kind is _BOOLS else "kv_idx"
        head = f"def e0(s) = {leaf if draw.random() < 0.5 else 's'}\n" + "".join(
            f"def e{n}(s) = {form.format(f'e{n - 1}(s)', f'e{n - 1}(s + {n})' if kind is not _BOOLS else f'e{n - 1}(s)')}\n"
            for n in range(1, levels)
        )
        body, last = "", f"e{levels - 1}({leaf})"
    score = f"dot(q, k) + {last}" if kind is _FLOATS else "dot(q, k)"
    mask = last if kind is _BOOLS else "causal" if kind is _FLOATS else f"{last} <= q_pos"
    return head + _attention(f"{_INPUTS}{body}  score = {score}\n  mask = {mask}\n", targets=_targets(draw))


def _many(draw: random.Random) -> str:
    """Many of what a file may hold many of."""
    count = _size(draw, 1200)
    body = "  score = dot(q, k) / sqrt(D)\n  mask = window({}, 0)\n"
    match draw.randrange(8):
        case 0:
            return "".join(_attention(body.format(n), f"a{n}", _targets(draw)) for n in range(count))
        case 1:
            params = "".join(
                f"  param p{n} in {{{', '.join(map(str, range(1, draw.randrange(2, 9))))}}}\n"
                for n in range(min(count, 9))
            )
            return _attention(params + body.format("p0"), targets=_targets(draw))
        case 2:
            return _attention(
                f"  param p in {{{', '.join(map(str, range(1, count + 1)))}}}\n" + body.format("p"),
                targets=_targets(draw),
            )
        case 3:
            sets = "tile.q in {16, 32, 64, 128}, tile.kv in {16, 32, 64, 128}, warps in {1, 2, 4, 8}, stages in {1, 2, 3, 4, 5, 6, 7, 8}"
            wheres = "\n".join(
                f"where tile.q * {n} <= {draw.randrange(100) * 1000} or warps == 4" for n in range(count)
            )
            return _attention(
                body.format(5) + "  grad q, k, v\n",
                targets=_targets(draw),
                knobs=f"\n{sets}\n{wheres}\nbackward {{ {sets} }}\n",
            )
        case 4:
            return _attention(body.format(5)) + "".join(
                f"schedule a for triton as s{n} {{ tile.q = 64 }}\n" for n in range(count)
            )
        case 5:
            inputs = "".join(f"  input x{n}: f32[N, X{n}]\n" for n in range(count))
            reads = " + ".join(f"x{n}[kv_idx, q_idx]" for n in range(min(count, 60)))
            return _attention(f"{inputs}  score = dot(q, k) + {reads}\n", targets=_targets(draw))
        case 6:
            return "".join(f"def d{n}(a) = a + kv_idx\n" for n in range(count)) + _attention(body.format(5))
        case _:
            return "".join(
                f"projection p{n} {{\n  param T in {{f16, bf16}}\n  input x: T[M, 64]\n  input w: T[{n + 1}, 64]\n  output y: T[M, {n + 1}]\n"
                f"  y = dot(x, w)\n}}\nschedule p{n} for triton {{ impl in {{gemv, flat}} }}\n"
                for n in range(count // 4 + 1)
            )


def _large(draw: random.Random) -> str:
    """As many characters as a file may have, or one more token than that takes."""
    piece = draw.choice(
        (
            "(",
            "a,",
            "#\n",
            "\n",
            "def a = 1\n",
            "1 + ",
            "f(",
            "x[",
            "attention a {\n",
            "$",
            "{",
            "a = a\n",
            "- ",
            "not ",
            "a < ",
            "é",
        )
    )
    head = draw.choice(
        ("", "def a = ", "attention a {\n", "schedule a for triton {\n", "attention a { mask = ")
    )
    return head + piece * (_size(draw, 270_000) // len(piece))


def _junk(draw: random.Random) -> bytes:
    return draw.randbytes(_size(draw, 5000))


_KINDS: dict[str, tuple[Callable[[random.Random], str | bytes], int]] = {
    "mutated": (_mutated, 400), "commented": (_commented, 250), "injected": (_injected, 150), "renamed": (_renamed, 120), "deep": (_deep, 10),
    "long": (_long, 10), "exploding": (_exploding, 10), "many": (_many, 6), "large": (_large, 6), "junk": (_junk, 30),
}  # fmt: skip
