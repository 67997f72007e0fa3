"""Which keywords programs pass to flash-attention's functions, read from their wheels and kept as data.

    python -m tests.compat.callers WHEEL...          # writes callers.json anew from sglang's and vllm's
    python -m tests.compat.callers --check WHEEL...  # says what they changed

A caller is a module of a wheel; a function is called by its name, or by one that a module made of it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

DATA = Path(__file__).parent / "callers.json"
#: Modules of wheels that call the functions with all that they have.
CALLERS = (
    "sglang/multimodal_gen/runtime/layers/attention/backends/flash_attn.py",
    "sglang/srt/layers/attention/flashattention_backend.py",
    "vllm/v1/attention/backends/flash_attn.py",
)
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
#: By caller and function the keywords that it passes.
Calls: TypeAlias = dict[str, dict[str, list[str]]]


def calls(text: str) -> dict[str, list[str]]:
    """The keywords of calls in a module, by function."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, keywords in _calls(ast.parse(text)):
        plain = re.sub(r"^_|_v\d$|_fa\d$|_fn$", "", name)
        if plain in FUNCTIONS:
            found[plain] |= keywords
    return {name: sorted(keywords) for name, keywords in sorted(found.items())}


def _calls(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield name, {keyword.arg for keyword in node.keywords if keyword.arg}


def read(wheels: Sequence[str]) -> Calls:
    """Those of the callers that are in these wheels."""
    found: Calls = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            inside = set(archive.namelist())
            found |= {at: calls(archive.read(at).decode()) for at in CALLERS if at in inside}
    return dict(sorted(found.items()))


def main(arguments: Sequence[str]) -> int:
    checks, wheels = "--check" in arguments, [x for x in arguments if x != "--check"]
    new = read(wheels)
    if not checks:
        DATA.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
        return 0
    old: Calls = json.loads(DATA.read_text(encoding="utf-8"))
    changed = [at for at in new if new[at] != old.get(at)]
    for at in changed:
        print(f"{at}: {old.get(at)} -> {new[at]}")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
