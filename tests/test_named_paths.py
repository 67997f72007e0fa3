"""Every file of this repository that a comment or a page names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_TOPS = "attnc|docs|tests|specs|grammar|templates|examples|tools|editors"
_PATH = re.compile(
    rf"(?<![\w/.<-])(?:{_TOPS})/[\w/.-]*\.(?:py|md|attn|lark|jinja|cuh|cu|h|json|png|yml|toml)\b"
)
#: Folders that are read, and what their files are called. generated/ repeats what templates say, and tests
#: name files that they write.
_READ = {
    ".": ("*.md", "Makefile", "*.toml", "*.in", "*.py"),
    ".ci": ("*",),
    ".github": ("**/*.yml",),
    "attnc": ("**/*.py", "**/*.cuh"),
    "docs": ("*.md", "*.py"),
    "examples": ("**/*.py", "**/*.attn", "**/*.yml"),
    "grammar": ("*.lark", "*.attn"),
    "specs": ("**/*.attn",),
    "templates": ("**/*.jinja", "**/*.h"),
    "tools": ("**/*.py", "**/*.attn"),
}
#: Files that a user writes in an example.
_WRITTEN_BY_READERS = {f"specs/{name}.attn" for name in ("my", "stream", "near", "step")} | {
    "specs/tuned/stream.json"
}


def test_every_named_file_exists() -> None:
    missing = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in _read()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in _PATH.finditer(line)
        if match[0] not in _WRITTEN_BY_READERS and "NAME" not in match[0] and not (ROOT / match[0]).exists()
    ]
    assert missing == []


def _read() -> list[Path]:
    found = {path for folder, names in _READ.items() for name in names for path in (ROOT / folder).glob(name)}
    return sorted(path for path in found if path.is_file() and path != Path(__file__))
