"""Names that CUDA text declares and never reads, left out: templates declare what many kinds of kernels may
need, and which of it one kernel reads is known when all of its text is there.
"""

from __future__ import annotations

import re

from attnc.target.layout import split_outside_brackets

#: `const int H = args.H, M = args.M;  // a remark`
_DECLARATION = re.compile(
    r"( +)((?:const )?(?:int|float|long long)|(?:const )?(?:\w+ )*\w+\* const) ([^;]+);( *//.*)?"
)
_NAMED = re.compile(r"(\w+) = [^=].*")
_HAS_EFFECT = re.compile(r"atomic|shfl|sync|\+\+|--")


def without_dead_locals(text: str) -> str:
    """The text, without names of local declarations that nothing in their block reads, nor what only they
    read.
    """
    lines = text.split("\n")
    at = len(lines)
    while at:
        at -= 1  # from the end, so that readers go before what they read
        declared = _DECLARATION.fullmatch(lines[at])
        if declared is None:
            continue
        indent, kind, rest, remark = declared.groups(default="")
        names = list(split_outside_brackets(rest, ", "))
        after = _block(lines, at, len(indent))
        kept: list[str] = []
        for named in reversed(names):
            if _is_read(named, f"{after}\n{'; '.join(kept)}"):
                kept.insert(0, named)
        if not kept:
            del lines[at]
        elif kept != names:
            lines[at] = f"{indent}{kind} {', '.join(kept)};{remark}"
    return "\n".join(lines)


def _block(lines: list[str], at: int, indent: int) -> str:
    """The code after a line, up to the end of the block that the line is in."""
    found = []
    for line in lines[at + 1 :]:
        code = line.split("//")[0]
        if code.strip() and not code.startswith("#") and len(code) - len(code.lstrip()) < indent:
            break
        found.append(code)
    return "\n".join(found)


def _is_read(named: str, after: str) -> bool:
    found = _NAMED.fullmatch(named)
    if found is None or _HAS_EFFECT.search(named):
        return True
    return re.search(rf"(?<![\w.]){found[1]}\b", after) is not None
