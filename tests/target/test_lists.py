"""What all languages print alike of kernels that make lists: those of keys, and of rows of memory."""

from __future__ import annotations

import pytest

from attnc.model.dtypes import DType
from attnc.plan.ir import Module
from attnc.target.lists import Lists, RowLists
from attnc.target.sm80.row_lists import lists_text
from attnc.target.triton.lists import ListsText
from attnc.target.triton.row_lists import RowListsText
from tests.verify.judging import modules_of

TEXT = """attention a {
  input q: bf16[T, Hkv * G, 64] via ragged(cu)
  input k, v: bf16[U, Hkv, 64] via ragged(ck)
  input cu, ck: i32[B + 1]
  input idx: i32[T, Hkv, S]
  score = dot(q, k) / 8
  mask = listed(idx, rows = 1, keys = 1) and causal
  normalize = softmax
  output o: bf16[T, Hkv * G, 64]
}

schedule a for TARGET {
  loops = [kv], pack = gqa
}
"""


def _of_rows(module: Module) -> Lists | None:
    assert module.lists is not None
    assert module.listed_rows is not None
    if module.target == "triton":
        return RowListsText(module, module.lists, module.listed_rows)
    return lists_text(module, {arg.tensor.name: DType(arg.tensor.dtype) for arg in module.args})


@pytest.mark.parametrize("target", ["triton", "cuda.sm_90a"])
def test_rows_lie_behind_the_first_of_their_sequence(target: str) -> None:
    (module,) = modules_of(TEXT.replace("TARGET", target))
    found = _of_rows(module)
    assert isinstance(found, RowLists)
    assert found.place("key") == "k_first + key"
    assert found.stop == "N"
    assert found.lines == "(1) * (Hkv) * (T)"
    assert {"S", "list_blocks", "T"} <= {*found.sizes}


def test_keys_are_their_own_places() -> None:
    text = (
        TEXT.replace("TARGET", "triton")
        .replace("[T, Hkv * G", "[B, M, Hkv * G")
        .replace(" via ragged(cu)", "")
    )
    text = (
        text.replace("[U, Hkv", "[B, N, Hkv")
        .replace(" via ragged(ck)", "")
        .replace("idx: i32[T,", "idx: i32[B, M,")
    )
    (module,) = modules_of(text.replace("  input cu, ck: i32[B + 1]\n", ""))
    assert module.lists is not None
    found = ListsText(module, module.lists)
    assert found.place("key") == "key"
    assert (found.stop, found.keeps) == ("list_blocks", [])
    assert found.lines == "(B) * (M) * (Hkv)"
