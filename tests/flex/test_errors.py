"""What is said of mods that no spec can say: the operation, its line in the user's file, a way out."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.diagnostics import CODES
from attnc.flex import FlexError, flex_attention, to_spec
from attnc.flex.errors import span_of

GOLDEN = Path(__file__).parents[1] / "golden" / "flex"

FLOAT, TABLE = torch.ones(4), torch.ones(4, 8)
Q = torch.ones(1, 4, 8, 16)

WORDS = torch.arange(64, dtype=torch.int32)


def arctangent(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.atan(score) + 1


def bits(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where((WORDS[q_idx] & WORDS[kv_idx]) == 0, score, 0.0)


def not_a_number(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx < kv_idx, score, torch.nan)


def infinite_product(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * torch.where(q_idx < kv_idx, 1.0, -torch.inf)


def other_bits(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score.view(torch.int32) * 1e-9


def slice_of_a_row(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h, :].sum()


def branch(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    if q_idx > kv_idx:
        return score
    return score * 2


def chained(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 0 <= q_idx - kv_idx < 4


def python_number(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + [1.0, 2.0][h]


def whole_tensor(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + FLOAT


def row_of_a_tensor(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h]


def float_as_index(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + FLOAT[h / 2]


def text(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + "1"


def constant(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return True


def division_by_zero(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + (q_idx - kv_idx) % 0


def beyond_float32(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    limit = 1e300
    return torch.where(q_idx > 3, score, score * limit)


def too_long(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return sum((torch.tanh(score * i) for i in range(1000)), score)


def number_for_a_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx


#: What the text of the spec says of them.
OF_SPECS = {"E0320": (division_by_zero,), "E0507": (beyond_float32,)}
MODS = {
    "E0901": (arctangent, bits, infinite_product, not_a_number, other_bits, slice_of_a_row),
    "E0902": (branch, chained, python_number),
    "E0903": (whole_tensor, row_of_a_tensor, float_as_index, text, number_for_a_mask, constant, too_long),
}


@pytest.mark.parametrize(
    ("code", "mod"),
    [(code, mod) for code, mods in {**MODS, **OF_SPECS}.items() for mod in mods],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_golden(code: str, mod: Callable[..., Any], golden: Callable[[Path, str], None]) -> None:
    mods = (None, mod) if mod in (chained, number_for_a_mask, constant) else (mod, None)
    with pytest.raises(FlexError) as caught:
        flex_attention(Q, Q, Q, mods[0], mask_mod=mods[1])
    assert [diagnostic.code for diagnostic in caught.value.diagnostics] == [code]
    said = re.sub(r"--> \S*test_errors.py:\d+", "--> mods.py:1", str(caught.value).strip())
    golden(
        GOLDEN / f"{code}_{mod.__name__}.txt", re.sub(r"^ *\d* \|", "   |", said, flags=re.MULTILINE) + "\n"
    )


def test_every_code_has_a_mod() -> None:
    assert {code for code in CODES if code.startswith("E09")} == set(MODS)


def test_what_a_mod_raises_itself_is_left_alone() -> None:
    def broken(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        to_spec(broken)


def test_a_package_whose_name_begins_like_torchs_is_the_users() -> None:
    """Its file lies at a path that begins with that of torch."""
    path = f"{Path(torch.__file__).parent}titan/mods.py"
    text = "def arctangent(score, b, h, q_idx, kv_idx):\n    return torch.atan(score)\n"
    names: dict[str, Any] = {"torch": torch}
    exec(compile(text, path, "exec"), names)
    with pytest.raises(FlexError) as caught:
        to_spec(names["arctangent"])
    span = caught.value.diagnostics[0].primary.span
    assert span.source.path.endswith("titan/mods.py")
    assert (span.start, span.end) == (0, 0)  # there is no such file to point into


def test_a_mod_is_refused_where_the_current_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(FlexError, match="'atan' cannot be written"):
        to_spec(arctangent)


def test_a_frame_that_no_user_has_is_nowhere() -> None:
    code = SimpleNamespace(co_filename=torch.__file__)
    inner = SimpleNamespace(f_code=code, f_back=SimpleNamespace(f_code=code, f_back=None))
    span = span_of(inner)  # type: ignore[arg-type]  # what it reads of a frame
    assert (span.start, span.end, span.source.path) == (0, 0, "<mod>")


def test_columns_count_letters_and_not_bytes() -> None:
    names: dict[str, Any] = {"torch": torch}
    text = "größe = 1\ndef mod(score, b, h, q, kv):\n    return 'é' and (größe * torch.atan(\n score) + 1)\n"
    linecache.cache["grö.py"] = (len(text), None, text.splitlines(True), "grö.py")
    exec(compile(text, "grö.py", "exec"), names)
    with pytest.raises(FlexError) as caught:
        to_spec(names["mod"])
    span = caught.value.diagnostics[0].primary.span
    assert span.source.text[span.start : span.end] == "torch.atan(\n score)"
    assert repr(caught.value) == str(caught.value)


def test_a_spec_that_is_asked_for_has_the_line_too() -> None:
    with pytest.raises(FlexError) as caught:
        to_spec(infinite_product)
    span = caught.value.diagnostics[0].primary.span
    assert span.source.text[span.start : span.end] == "score * torch.where(q_idx < kv_idx, 1.0, -torch.inf)"


def chained_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 4)


@pytest.mark.parametrize("mod", [None, chained_window])
def test_an_error_of_no_mod_points_to_the_call(mod: Any) -> None:
    q = torch.ones(1, 1, 8, 16)
    with pytest.raises(FlexError, match="E0") as caught:
        flex_attention(q, q, q, mask_mod=mod, kernel_options={"BLOCK_N": 8})
    span = caught.value.diagnostics[0].primary.span
    assert span.source.path.endswith("test_errors.py")
    assert span.source.text[span.start :].startswith("flex_attention(q, q, q")
