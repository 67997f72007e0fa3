"""What editors are told: of texts that are right, half written and wrong; and the files of `editors/`."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from attnc import editor
from attnc.cli.new import starters
from attnc.expr.nodes import INDICES
from attnc.model.knobs import KEYS
from attnc.model.names import DIMS
from attnc.source import Source
from attnc.syntax.format import format_file
from attnc.syntax.parser import parse

ROOT = Path(__file__).parent.parent
VSCODE = ROOT / "editors" / "vscode"
TEXT = """\
def near(width) = abs(q_pos - kv_idx) < width

attention mine {
  param D in {64}
  input q: bf16[B, M, Hkv * G, D]   # the mask is below
  input k, v: bf16[B, N, Hkv, D]
  input doc: i32[B, N] is sorted
  let limit = 3 * M
  score = dot(q, k) / sqrt(D)
  mask = causal and near(limit)
  normalize = softmax
  output o: bf16[B, M, Hkv * G, D]
}

schedule mine for triton {
  tile.q = 64, tile.kv = 64
  order = longest_first
}
"""


#: What `npm install` and `vsce package` leave beside the extension.
_OF_NPM = {"node_modules", "package-lock.json", "attn-0.1.0.vsix"}


def about(text: str, words: str, at: int = 0) -> str:
    """The hover `at` characters into the first place of `words`."""
    found = editor.hover(Source("mine.attn", text), text.index(words) + at)
    return found.text if found else ""


def words(text: str) -> list[str]:
    """What completes a text at its mark, which is left out: '|'."""
    offset = text.index("|")
    return [found.word for found in editor.complete(Source("mine.attn", text.replace("|", "")), offset)]


def test_the_mask_shows_its_tiles() -> None:
    rows = ["/.......", "#/......", "##/.....", "###/....", "####/...", "#####/..", "######/.", "#######/"]
    text = TEXT.replace(" and near(limit)", "")
    for place in ("mask =", "mine {"):
        assert "\n".join(rows) in about(text, place)
    assert "28 skipped, 8 partial, 28 full of 64" in about(text, "mine for", 1)


@pytest.mark.parametrize(
    ("place", "meaning"),
    [
        ("near(limit)", "def near(width) = abs(q_pos - kv_idx) < width"),
        ("causal and", "def causal = kv_idx <= q_pos"),
        ("doc:", "input doc: i32[B, N] is sorted"),
        ("limit)", "let limit = 3 * M"),
        ("kv_idx)", "the row of k and v, 0 to N - 1"),
        ("Hkv, D]", "K/V heads"),
        ("order", "default or longest_first"),
        ("tile.kv", "a power of two"),
        ("normalize", "`sink = ..., dropout = p"),
        ("abs(", "an intrinsic function"),
        ("bf16", "an element type"),
    ],
)
def test_words_are_explained(place: str, meaning: str) -> None:
    assert meaning in about(TEXT, place)


def test_comments_and_gaps_have_no_hover() -> None:
    assert about(TEXT, "mask is below") == about(TEXT, "= 3") == ""
    assert editor.hover(Source("", ""), 0) is None


def test_a_wrong_spec_has_no_picture_but_meanings() -> None:
    wrong = TEXT.replace("near(limit)", "near(")
    assert "`mask = condition`" in about(wrong, "mask =")
    assert "def causal" in about(wrong, "causal and")


def test_messages_are_those_of_check() -> None:
    assert editor.diagnose(Source("mine.attn", TEXT.replace("causal", "casual")))[0].code == "E0203"
    assert [d.code for d in editor.diagnose(Source("mine.attn", ""))] == ["W0804"]
    assert editor.diagnose(Source("mine.attn", TEXT.replace("  input doc: i32[B, N] is sorted\n", ""))) == ()


def test_formatting() -> None:
    untidy = TEXT.replace("  mask  ", "mask").replace("  score =", "      score   =")
    assert editor.format_text(Source("", untidy)) == format_file(parse(Source("", TEXT)))
    assert editor.format_text(Source("", "attention {")) is None


@pytest.mark.parametrize(
    ("text", "expected", "excluded"),
    [
        ("|", {"attention", "schedule", "projection", "def"}, {"input", "causal"}),
        ("attention a {\n  in|", {"input", "mask", "score"}, {"causal", "tile.q", "attention"}),
        ("attention a {\n  input doc: |", {"bf16", "i32"}, {"causal"}),
        ("attention a {\n  input doc: i32[B]\n  mask = d|", {"doc", "causal", "q_pos", "abs"}, {"tile.q"}),
        ("def f = q|", {"q_pos"}, {"tile.q"}),
        ("attention a {\n}\nschedule a for triton {\n  |", {"tile.q", "backward", "where"}, {"causal"}),
        ("schedule a for triton {\n  order = |", {"longest_first"}, {"tile.q"}),
        ("schedule a for triton {\n  order = default, |", {"tile.q"}, {"input"}),
        ("attention a {  # mask = |", set(), {"causal", "input"}),
    ],
)
def test_completion(text: str, expected: set[str], excluded: set[str]) -> None:
    found = set(words(text))
    assert expected <= found
    assert not excluded & found


def test_no_prefix_of_a_text_is_too_short() -> None:
    """An editor asks at every key stroke."""
    for end in range(0, len(TEXT), 7):
        source = Source("mine.attn", TEXT[:end])
        editor.complete(source, end)
        editor.hover(source, max(0, end - 1))


def test_every_index_and_size_has_a_meaning() -> None:
    for name in (*INDICES, *DIMS):
        text = f"attention a {{\n  mask = {name}"
        assert about(text, name, len(name)).startswith(f"**{name}**: ") or name in ("b", "h"), name
        assert "an index" not in about(f"attention a {{\n  let x = {name} ", f"{name} ")


def test_every_schedule_key_is_completed() -> None:
    assert set(KEYS) <= set(words("schedule a for triton {\n  |"))


# --- editors/ -----------------------------------------------------------------------------------------------


def test_the_grammar_is_one_file() -> None:
    assert (
        VSCODE / "syntaxes" / "attn.tmLanguage.json"
    ).resolve() == ROOT / "grammar" / "attn.tmLanguage.json"


def test_what_the_extension_names_is_there() -> None:
    package = json.loads((VSCODE / "package.json").read_text())
    contributed = package["contributes"]
    paths = [entry["path"] for kind in ("grammars", "snippets") for entry in contributed[kind]]
    paths += [package["main"], *(language["configuration"] for language in contributed["languages"])]
    for path in paths:
        assert (VSCODE / path).is_file(), path
    grammar = json.loads((VSCODE / contributed["grammars"][0]["path"]).read_text())
    assert contributed["grammars"][0]["scopeName"] == grammar["scopeName"]
    assert json.loads((VSCODE / "language-configuration.json").read_text())["comments"]["lineComment"] == "#"


def test_the_extensions_manifest_is_one_that_vscode_reads() -> None:
    """By the rules of VS Code's reference of package.json for what is contributed here."""
    package = json.loads((VSCODE / "package.json").read_text())
    texts = {"name", "displayName", "description", "version", "publisher", "license", "main"}
    assert {key for key, value in package.items() if isinstance(value, str)} == texts
    assert package.keys() - texts == {"engines", "categories", "contributes", "dependencies", "files"}
    own = {path.name for path in VSCODE.iterdir()} - {"package.json", *_OF_NPM}
    assert set(package["files"]) == own | {"node_modules"}
    assert re.fullmatch(r"[a-z0-9-]+", package["name"])
    assert re.fullmatch(r"[a-z0-9-]+", package["publisher"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
    assert re.fullmatch(r"\^1\.\d+\.\d+", package["engines"]["vscode"])
    assert set(package["categories"]) <= {"Programming Languages", "Snippets", "Linters", "Formatters"}
    wanted = {
        "languages": {"id", "aliases", "extensions", "configuration"},
        "grammars": {"language", "scopeName", "path"},
        "snippets": {"language", "path"},
    }
    contributed = package["contributes"]
    assert contributed.keys() == {*wanted, "configuration"}
    for kind, keys in wanted.items():
        assert all(entry.keys() == keys for entry in contributed[kind]), kind
    (language,) = contributed["languages"]
    assert all(extension.startswith(".") for extension in language["extensions"])
    assert {entry["language"] for kind in ("grammars", "snippets") for entry in contributed[kind]} == {
        language["id"]
    }
    for name, setting in contributed["configuration"]["properties"].items():
        assert name.startswith(f"{language['id']}.")
        assert setting.keys() == {"type", "default", "description"}
        assert setting["type"] == "string"
        assert isinstance(setting["default"], str)
    used = set(
        re.findall(r"getConfiguration\(\"(\w+)\"\)\.get\(\"(\w+)\"", (VSCODE / "extension.js").read_text())
    )
    assert {f"{section}.{name}" for section, name in used} == {*contributed["configuration"]["properties"]}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which reads JavaScript")
def test_the_extension_is_javascript() -> None:
    subprocess.run(["node", "--check", VSCODE / "extension.js"], check=True)


def test_snippets_are_the_specs_that_new_starts_from(golden: Callable[[Path, str], None]) -> None:
    golden(VSCODE / "snippets" / "attn.json", snippets())


def snippets() -> str:
    made = {}
    for name, path in starters().items():
        first, *rest = path.read_text(encoding="utf-8").splitlines()
        body = [line.replace("$", "\\$").replace(" example ", " ${1:name} ") for line in (first, *rest)]
        made[name] = {"prefix": name, "description": first.removeprefix("# "), "body": body}
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"
