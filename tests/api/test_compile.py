"""Which target `attnc.compile` takes where its caller names none, and how it sums gradients, on GPUs that are
not here.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attnc
from attnc.api import compile as compiling
from attnc.api import fastest
from attnc.support.devices import CPU
from tests.gpus import fake_gpu
from tests.support.configs import H200

SPEC = """
attention {name} {{
  {params}input q: {dtype}[B, M, Hkv * G, {width}]
  input k, v: {dtype}[B, N, Hkv, {width}]
  score = dot(q, k) / sqrt(D)
  mask = {mask}
  normalize = softmax
  output o: {dtype}[B, M, Hkv * G, {width}]
  {grad}
}}
"""
FOR_TRITON = "schedule it for triton {\n  tile.q = 64, tile.kv = 64\n}\n"
FOR_HOPPER = "schedule it for cuda.sm_90a {\n  tile.kv = 128\n}\n"
FOR_DECODING = "schedule it for triton {\n  loops = [kv], pack = gqa, split.kv = auto, tile.q = 16\n}\n"


def spec(schedules: str = "", **changes: str) -> str:
    usual = {"name": "it", "params": "", "dtype": "bf16", "width": "128", "mask": "causal", "grad": ""}
    return SPEC.format(**{**usual, **changes}) + schedules


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    monkeypatch.setattr(compiling, "_FAMILIES", {})


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("text", "target"),
    [
        (spec(), "cuda.sm_90a"),
        (spec(grad="grad q, k, v"), "cuda.sm_90a"),
        (spec(dtype="f32"), "cuda.sm_80"),
        (spec(dtype="f32", width="64"), "triton"),
        (spec(dtype="f32", width="64", grad="grad q, k, v"), "cuda.sm_80"),
        (spec(f"{FOR_TRITON}\n{FOR_HOPPER}"), "cuda.sm_90a"),
        (spec(f"{FOR_HOPPER}\n{FOR_TRITON}"), "cuda.sm_90a"),
        (spec(FOR_DECODING), "triton"),
    ],
)
def test_a_hopper_takes_its_fastest_without_a_word(text: str, target: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attnc.compile(text, cache=False).target == target


@pytest.mark.usefixtures("hopper")
def test_a_schedule_for_a_slower_target_is_honoured_and_said() -> None:
    with pytest.warns(UserWarning, match=r"cuda\.sm_90a, .* need a schedule of their own for 'it'") as said:
        attnc.compile(spec(FOR_TRITON), cache=False)
    assert attnc.compile(spec(FOR_TRITON), cache=False).target == "triton"
    assert [warning.filename for warning in said] == [__file__]
    assert attnc.compile(spec(FOR_TRITON), target="cuda.sm_90a", cache=False).target == "cuda.sm_90a"


@pytest.mark.usefixtures("hopper")
def test_what_the_fastest_cannot_say_runs_on_the_next(tmp_path: Any) -> None:
    """Found again, by another process, with what was said."""
    text = spec(width="520")
    for _ in range(2):
        compiling._FAMILIES.clear()
        fastest._SAID.clear()
        with pytest.warns(UserWarning, match="need a spec without this: 520 columns of o are not lowered"):
            assert attnc.compile(text, cache=tmp_path).target == "triton"


def test_other_gpus_take_another_package_of_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = spec()
    for capability, target in ((80, "triton"), (90, "cuda.sm_90a"), (100, "triton")):
        fake_gpu(monkeypatch, capability)
        assert attnc.compile(text, cache=False).target == target
    fake_gpu(monkeypatch, 90, packages=["triton"])
    with pytest.warns(UserWarning, match="need cupy"):
        assert attnc.compile(text, cache=False).target == "triton"


# --- calls of few queries

DECODING = """attention decode {
  input q: bf16[B, M, Hkv * G, 64]
  input k, v: bf16[B, N, Hkv, 64] via paged(block_table, page = 16)
  input block_table: i32[B, P]
  input kv_len: i32[B]
  length N = kv_len[b]
  score = dot(q, k) / sqrt(D)
  mask = causal
  normalize = softmax
  output o: bf16[B, M, Hkv * G, 64]
}
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("target", ["triton", "cuda.sm_80", "cuda.sm_90a"])
def test_few_queries_split_the_keys(target: str) -> None:
    decode = attnc.compile(DECODING, target=target, cache=False)
    chunks = ("chunk",) if target == "cuda.sm_90a" else ()
    assert decode.variants == ("decode", *chunks, "prompt")
    assert "as decode {\n  loops = [kv], pack = gqa, split.kv = auto" in decode.spec
    pages = (torch.randn(8, 16, 2, 64).bfloat16() for _ in "kv")
    table = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    q, rest = torch.randn(2, 17, 4, 64).bfloat16(), (*pages, table, torch.tensor([40, 33], dtype=torch.int32))
    for rows, label in ((1, "decode"), (16, "decode"), (17, "prompt")):
        chosen = decode(q[:, :rows], *rest)
        assert torch.equal(chosen, decode(q[:, :rows], *rest, schedule=label))
        other = decode(q[:, :rows], *rest, schedule="prompt")
        torch.testing.assert_close(chosen, other, atol=0.02, rtol=0.02)


def test_an_exported_program_takes_any_number_of_queries() -> None:
    causal = attnc.compile(spec(dtype="f16", width="32"), target="triton", cache=False)
    assert causal.variants == ("decode", "prompt")

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return causal(q, k, v)

    q, (k, v) = torch.randn(1, 20, 2, 32).half(), torch.randn(2, 1, 30, 2, 32).half()
    queries = torch.export.Dim("queries", min=2, max=4096)
    program = torch.export.export(
        Layer(), (q, k, v), dynamic_shapes={"q": {1: queries}, "k": None, "v": None}
    )
    for rows in (3, 20):
        exported = program.module()(q[:, :rows], k, v)
        assert torch.equal(exported, causal(q[:, :rows], k, v, schedule="prompt"))


DROPOUT = "softmax(dropout = rate, seed = draws)"
INPUTS = "input rate: f32[]\n  input draws: i64[]\n  "


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", ["triton", "cuda.sm_80", "cuda.sm_90a"])
@pytest.mark.parametrize(
    "text",
    [spec(grad="grad q, k, v"), spec(params=INPUTS).replace("= softmax", f"= {DROPOUT}")],
    ids=["gradients", "dropout"],
)
def test_what_decoding_has_not_keeps_one_kernel(text: str, target: str) -> None:
    assert attnc.compile(text, target=target, cache=False).variants == ("default",)


# --- how gradients are summed -------------------------------------------------------------------------------

GRADIENTS = "grad q, k, v"


def backward_of(text: str, *, deterministic: bool = True) -> str:
    """Returns the backward block of the schedule that a spec gets on a Hopper, "" for none."""
    family = attnc.compile(text, target="cuda.sm_90a", deterministic=deterministic, cache=False)
    _, _, block = family.spec.partition("  backward {\n")
    return "; ".join(line.strip() for line in block.partition("\n  }")[0].splitlines())


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("changes", "same_bits", "fastest"),
    [
        ({}, "accumulate.dq = ordered", "accumulate.dq = atomic"),
        ({"width": "64"}, "accumulate.dq = ordered", "accumulate.dq = atomic"),
        ({"mask": "window(512, 0)"}, "accumulate.dq = ordered", "accumulate.dq = atomic"),
        ({"mask": "(q_pos - kv_idx) % 256 < 3"}, "", "accumulate.dq = atomic"),  # no neighbours: no turns
        ({"width": "256"}, "", ""),  # no kernel of wgmma adds to dq
        ({"grad": ""}, "", ""),
    ],
)
def test_gradients_without_a_schedule_take_the_fastest_way(
    changes: dict[str, str], same_bits: str, fastest: str
) -> None:
    text = spec(**{"grad": GRADIENTS, **changes})
    assert backward_of(text) == same_bits
    assert backward_of(text, deterministic=False) == fastest


def test_each_variant_takes_its_own_way() -> None:
    text = spec(params="param D in {64, 256}\n  ", width="D", grad=GRADIENTS)
    assert backward_of(text) == "when D == 64 { accumulate.dq = ordered }"


def test_explain_says_how_gradients_are_summed() -> None:
    family = attnc.compile(spec(grad=GRADIENTS), target="cuda.sm_90a", cache=False)
    assert "accumulate.dq = ordered" in family.explain()
    fast = attnc.compile(spec(grad=GRADIENTS), target="cuda.sm_90a", deterministic=False, cache=False)
    assert "accumulate.dq = atomic" in fast.explain()


def test_other_targets_sum_in_two_passes_unless_atomics_are_faster() -> None:
    text = spec(dtype="f32", width="64", grad=GRADIENTS)
    for target, way in (("triton", ""), ("cuda.sm_80", "accumulate.dq = atomic")):
        family = attnc.compile(text, target=target, cache=False)
        assert "accumulate.dq" not in family.spec
        fast = attnc.compile(text, target=target, deterministic=False, cache=False)
        assert ("accumulate.dq = atomic" in fast.spec) == bool(way)


LATENT = """
attention latent {
  input q: bf16[B, M, G, 576]
  input k: bf16[B, N, 1, 576] via paged(block_table, page = 64)
  input v: bf16[B, N, 1, 512] via prefix(k)
  input block_table: i32[B, P]
  input kv_len: i32[B]
  length N = kv_len[b]
  score = dot(q, k) / sqrt(192)
  mask = causal
  normalize = softmax
  output o: bf16[B, M, G, 512]
}
"""


@pytest.mark.usefixtures("hopper")
def test_latent_attention_takes_the_kernel_that_shares_keys_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        family = attnc.compile(LATENT, cache=False)
    assert family.target == "cuda.sm_90a"
    assert "split.kv = auto" in family.spec


SELECTED = """
attention selected {{
  input q: bf16[B, M, 16, 576]
  input k: bf16[B, N, 1, 576]
  input v: bf16[B, N, 1, 512] via prefix(k)
  input tokens: i32[B, M, S] is distinct
  score = dot(q, k) / sqrt(192)
  mask = listed(tokens, rows = 1, keys = 1) and causal
  normalize = softmax
  output o: bf16[B, M, 16, 512]
  output lse: f32[B, 16, M]
  {grad}
}}
"""


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("grad", "target"), [("", "cuda.sm_90a"), ("grad q, k", "triton")])
def test_selected_keys_take_a_target_that_has_the_gradients_asked_for(grad: str, target: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        family = attnc.compile(SELECTED.format(grad=grad), cache=False)
    assert family.target == target
    modules = [family.module.default] if grad else [family.module.union, family.module.each]
    assert [bool(module.CALL.backward) for module in modules] == [bool(grad)] * len(modules)
    forwards = [module.CALL.forward for module in modules]
    if not grad:
        assert forwards == [None, None]
        return
    (forward,) = forwards  # Triton's gradients are made of what Hopper's kernels leave
    assert (forward.file, forward.serves(CPU), forward.serves(H200)) == ("union", False, True)


@pytest.mark.usefixtures("hopper")
def test_gradients_of_selected_keys_stand_behind_a_forward_that_leaves_what_they_read() -> None:
    """Also an lse that is no result. Blocks of each query, and schedules of a spec, keep to one target."""
    text = SELECTED.format(grad="grad q, k").replace("output lse: f32[B, 16, M]", "")
    for more, target in (("", "union"), ("schedule selected for triton { loops = [kv], pack = gqa }\n", "")):
        call = attnc.compile(text + more, cache=False).module.default.CALL
        assert [tensor.name for tensor in call.extras] == ["lse"]
        assert (call.forward.file if call.forward else "") == target
        assert not call.forward or call.forward.extras == call.extras
    assert attnc.compile(LISTED["blocks"], cache=False).module.default.CALL.forward is None


@pytest.mark.usefixtures("hopper")
def test_a_family_that_travels_keeps_the_kernels_that_make_its_results() -> None:
    """Not so one of its text alone, which names a target."""
    family = attnc.compile(SELECTED.format(grad="grad q, k"))
    again = pickle.loads(pickle.dumps(family))
    calls = [made.module.default.CALL for made in (family, again)]
    assert [(call.forward.file, call.forward.operator) for call in calls] == [
        (calls[0].forward.file, calls[0].forward.operator)
    ] * 2
    assert calls[0].operator == calls[1].operator
    alone = attnc.compile(str(family.spec), target=family.target)
    assert alone.module.default.CALL.forward is None
    assert pickle.loads(pickle.dumps(alone)).ahead is None


@pytest.mark.usefixtures("hopper")
def test_kernels_that_make_results_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And where their target has none, no other process tries again."""
    made: list[str] = []
    own = compiling._package_for

    def note(program: Any, name: str, target: str, *given: Any) -> Any:
        made.append(target)
        return own(program, name, target, *given)

    monkeypatch.setattr(compiling, "_package_for", note)
    wide = SELECTED.format(grad="grad q, k")
    for text, has_forward in ((wide, True), (wide.replace("576", "20").replace("512", "12"), False)):
        for is_first in (True, False):
            monkeypatch.setattr(compiling, "_FAMILIES", {})
            made.clear()
            family = attnc.compile(text, cache=tmp_path)
            assert family.target == "triton"
            assert made.count("cuda.sm_90a") == is_first
            assert is_first or not made
            assert (family.module.default.CALL.forward is not None) == has_forward


PACKED_BLOCKS = """
attention blocks {
  input q: bf16[T, Hkv * G, 128] via ragged(cu_q)
  input k, v: bf16[B, N, Hkv, 128] via paged(block_table, page = 64)
  input cu_q: i32[B + 1]
  input block_table: i32[B, P]
  input kv_len: i32[B]
  input selected: i32[LISTS, S]
  length N = kv_len[b]
  score = dot(q, k) / sqrt(128)
  mask = MASK and causal
  normalize = softmax
  output o: bf16[T, Hkv * G, 128]
}
"""


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("lists", "mask"),
    [("T, Hkv", "listed(selected, rows = 1, keys = 64)"), ("B, Hkv", "listed(selected, keys = 64)")],
)
def test_blocks_that_packed_queries_select_need_no_schedule_on_hopper(lists: str, mask: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        family = attnc.compile(PACKED_BLOCKS.replace("LISTS", lists).replace("MASK", mask), cache=False)
    assert family.target == "cuda.sm_90a"


BLOCKS = """
attention blocks {
  input q: bf16[B, M, Hkv * G, 128]
  input k, v: bf16[B, N, Hkv, 128]
  input selected: i32[B, M, Hkv, S]
  score = dot(q, k) / sqrt(128)
  mask = listed(selected, rows = 1, keys = 64) and causal
  normalize = softmax
  output o: bf16[B, M, Hkv * G, 128]
}
"""


PREFIX = "  input v: bf16[B, N, Hkv, 128] via prefix(k)"


@pytest.mark.usefixtures("hopper")
def test_blocks_that_each_query_selects_run_on_hopper_where_a_caller_names_it() -> None:
    """And on Triton, which is faster, where nobody does."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attnc.compile(BLOCKS, cache=False).target == "triton"
        named = attnc.compile(BLOCKS, target="cuda.sm_90a", cache=False)
    assert "loops = [kv], pack = gqa" in named.spec


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("dtype", "target"), [("f32", "triton"), ("bf16", "cuda.sm_90a")])
def test_lists_run_where_they_were_timed_unless_a_caller_names_a_target(dtype: str, target: str) -> None:
    text = BLOCKS.replace("bf16", dtype).replace("rows = 1", "rows = 64")
    assert attnc.compile(text, cache=False).target == target
    assert attnc.compile(text, target="cuda.sm_80", cache=False).target == "cuda.sm_80"


#: Blocks and tokens that each query lists, of columns of keys too, with gradients.
LISTED = {
    "blocks": BLOCKS.replace("128]\n}", "128]\n  grad q, k, v\n}"),
    "tokens": BLOCKS.replace("keys = 64", "keys = 1").replace("128]\n}", "128]\n  grad q, k, v\n}"),
    "latents": BLOCKS.replace("keys = 64", "keys = 1")
    .replace(
        "G, 128]\n  input k, v: bf16[B, N, Hkv, 128]", "G, 192]\n  input k: bf16[B, N, Hkv, 192]\n" + PREFIX
    )
    .replace("128]\n}", "128]\n  grad q, k\n}"),
}


@pytest.mark.parametrize("kind", LISTED)
def test_keys_that_each_query_lists_get_a_schedule_on_hopper_beside_gradients(kind: str) -> None:
    """Which has none of them, and says so."""
    with pytest.warns(attnc.SpecWarning, match="W0802"):
        named = attnc.compile(LISTED[kind], target="cuda.sm_90a", cache=False)
    assert "loops = [kv], pack = gqa" in named.spec


BLOCKS_OF_QUERIES = """
attention selected {{
  input q: bf16[B, M, {heads}, 64]
  input k, v: bf16[B, N, {kv_heads}, 64]
  input blocks: i32[B, {kv_heads}, M, S]
  score = dot(q, k) / 8
  mask = listed(blocks, rows = 1, keys = 16) and causal
  normalize = softmax
  output o: bf16[B, M, {heads}, 64]
  {grad}
}}
"""


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("grad", ["", "grad q, k, v"])
def test_many_queries_that_share_blocks_have_hoppers_kernels(
    grad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's have the few, and all gradients."""

    class Taken(Exception):
        pass

    def take(whose: str) -> Callable[..., None]:
        def tell(*_: object) -> None:
            raise Taken(whose)

        return tell

    text = BLOCKS_OF_QUERIES.format(heads=8, kv_heads=2, grad=grad)
    family = attnc.compile(text, cache=False)
    call = family.module.default.CALL
    assert (family.target, call.forward.file, call.forward_above) == ("triton", "default", 8)
    assert bool(call.backward) == bool(grad)
    monkeypatch.setattr(call.forward, "serves", lambda _: True)
    monkeypatch.setattr(call.forward, "_prepare", take("Hopper"))
    monkeypatch.setattr(call, "_order_configs", take("Triton"))
    for queries, whose in ((8, "Triton"), (9, "Hopper")):
        q, k = (torch.zeros(1, queries, heads, 64, dtype=torch.bfloat16) for heads in (8, 2))
        lists = torch.zeros(1, 2, queries, 3, dtype=torch.int32)
        with pytest.raises(Taken, match=whose):
            call._prepare((q, k, k, lists), None, None, call.no_extras)


@pytest.mark.usefixtures("hopper")
def test_queries_whose_heads_are_no_number_share_no_blocks() -> None:
    call = attnc.compile(
        BLOCKS_OF_QUERIES.format(heads="Hkv * G", kv_heads="Hkv", grad=""), cache=False
    ).module.default.CALL
    assert (call.forward, call.forward_above) == (None, 0)
