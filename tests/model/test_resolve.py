"""What specs mean: roles, types and expressions of the examples, and of small variations on one attention."""

from pathlib import Path

import pytest

from attnc.expr.nodes import Binary, Call, Const, Dim, Expr, Load, Param, show, walk
from attnc.model.attention import Attention
from attnc.model.declarations import DEFAULT_HEAD_DIMS
from attnc.model.dtypes import DType
from attnc.model.tensors import Paged, Prefix, Ragged, Role
from tests.model.resolving import EXAMPLES, SPECS, attention_of, plain, resolve_path, resolve_text

BATCH, QUERY, KEY, HEAD, FEATURE = Role.BATCH, Role.QUERY, Role.KEY, Role.HEAD, Role.FEATURE


def only(path: Path) -> Attention:
    [attention] = resolve_path(path).attentions
    return attention


def spec(name: str) -> Attention:
    return only(next(path for path in (*SPECS, *EXAMPLES) if path.stem == name))


@pytest.mark.parametrize("path", [*SPECS, *EXAMPLES], ids=lambda path: path.stem)
def test_specs_resolve_without_warnings(path: Path) -> None:
    program = resolve_path(path)
    assert not program.warnings
    assert program.attentions or program.projections
    for attention in program.attentions:
        assert attention.score.type == "float"
        assert attention.mask.type == "bool"
        assert all(node.span is not None for node in (attention.score, attention.mask) if node != Const(True))


@pytest.mark.parametrize(
    ("name", "q", "k", "lse"),
    [
        ("fa1", (BATCH, HEAD, QUERY, FEATURE), (BATCH, HEAD, KEY, FEATURE), (BATCH, HEAD, QUERY)),
        ("causal_gqa", (BATCH, QUERY, HEAD, FEATURE), (BATCH, KEY, HEAD, FEATURE), (BATCH, HEAD, QUERY)),
        ("odd_dims", (BATCH, QUERY, HEAD, FEATURE), (BATCH, KEY, HEAD, FEATURE), (BATCH, QUERY, HEAD)),
        ("varlen", (QUERY, HEAD, FEATURE), (KEY, HEAD, FEATURE), (QUERY, HEAD)),
    ],
)
def test_roles_are_read_off_the_shape(
    name: str, q: tuple[Role, ...], k: tuple[Role, ...], lse: tuple[Role, ...] | None
) -> None:
    attention = spec(name)
    assert attention.q.roles == q
    assert attention.o.roles == q
    assert attention.k.roles == attention.v.roles == k
    assert (attention.lse.roles if attention.lse else None) == lse


def test_storage() -> None:
    varlen, paged, mla = spec("varlen"), spec("paged_decode"), spec("mla_decode")
    assert varlen.q.storage == varlen.o.storage == Ragged(cu_seqlens="cu_q")
    assert varlen.k.storage == varlen.v.storage == Ragged(cu_seqlens="cu_k")
    assert paged.k.storage == paged.v.storage == Paged(block_table="block_table", page=16)
    assert mla.k.storage == Paged(block_table="block_table", page=64)
    assert mla.v.storage == Prefix(of="k")
    assert {name: show(length) for name, length in paged.lengths.items()} == {"N": "kv_len[b]"}


@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "meaning"),
    [
        ("H", "H", ("H", "H", "1")),
        ("Hkv * G", "Hkv", ("Hkv * G", "Hkv", "G")),
        ("G * Hkv", "Hkv", ("G * Hkv", "Hkv", "G")),
        ("G", "1", ("G", "1", "G")),
        ("32", "8", ("32", "8", "4")),
        ("Hkv * 3", "Hkv", ("Hkv * 3", "Hkv", "3")),
    ],
)
def test_heads_dimensions_mean_the_same_in_every_spec(
    heads_q: str, heads_kv: str, meaning: tuple[str, str, str]
) -> None:
    attention = attention_of(
        f"""attention a {{
          input q: f16[B, M, {heads_q}, D]
          input k, v: f16[B, N, {heads_kv}, D]
          input a: f32[H, Hkv, G]
          score = dot(q, k) + a[h, 0, 0]
          normalize = softmax
          output o: f16[B, M, H, D]
        }}"""
    )
    assert tuple(show(size) for size in attention.tensor("a").shape) == meaning
    assert show(attention.group) == meaning[2]


@pytest.mark.parametrize(
    ("last", "meaning", "params"),
    [
        ("D", Param("D", "int"), ["D"]),
        ("80", Const(80), []),
    ],
)
def test_head_dimension_is_the_last_axis_of_q(last: str, meaning: Expr, params: list[str]) -> None:
    attention = attention_of(
        f"""attention a {{
          input q: f16[B, M, H, {last}]
          input k, v: f16[B, N, H, {last}]
          score = dot(q, k) / sqrt(D) + Dv
          normalize = softmax
          output o: f16[B, M, H, Dv]
        }}"""
    )
    assert Call("sqrt", (meaning,)) in tuple(walk(attention.score))
    assert attention.o.shape[-1] == attention.v.shape[-1] == meaning
    assert [param.name for param in attention.params] == params
    assert all(param.choices == DEFAULT_HEAD_DIMS for param in attention.params)


def test_sizes_that_are_left_open_become_params() -> None:
    attention = attention_of(plain())
    [param] = attention.params
    assert param.choices == (64, 128)
    assert not any(isinstance(axis, Dim) and axis.name == "D" for axis in attention.q.shape)


def test_def_bodies_have_the_span_of_the_call() -> None:
    attention = attention_of(plain(mask="q_pos >= 3 and window(4, kv_idx - 1)"))
    texts = {show(node): node.span.text for node in walk(attention.mask) if node.span}
    assert texts["q_pos - 4"] == "window(4, kv_idx - 1)"
    assert texts["kv_idx - 1"] == "kv_idx - 1"
    assert texts["q_pos >= 3"] == "q_pos >= 3"


def test_lets_have_their_own_spans() -> None:
    attention = attention_of(plain("let near = kv_idx > q_pos - 5", mask="causal and near"))
    assert show(attention.mask) == "kv_idx <= q_pos and kv_idx > q_pos - 5"
    assert [node.span.line for node in walk(attention.mask) if node.span and "5" in show(node)][-1] == 4


def test_an_input_can_be_an_argument() -> None:
    text = "def same(ids) = ids[b, q_pos] == ids[b, kv_idx]\n" + plain(
        "input doc: i32[B, N] is sorted", mask="same(doc)"
    )
    loads = [node for node in walk(attention_of(text).mask) if isinstance(node, Load)]
    assert [load.tensor for load in loads] == ["doc", "doc"]
    assert all(load.is_sorted and load.type == "int" for load in loads)


def test_scalars_and_numbers() -> None:
    attention = attention_of(plain("input cap: f32[]", score="softcap(dot(q, k), cap) * -0.5 - cap[]"))
    assert show(attention.score) == "cap * tanh(dot(q, k) / cap) * -0.5 - cap"
    assert attention.score.type == "float"


def test_params_of_every_kind() -> None:
    attention = attention_of(
        plain(
            "param W in {8, 16}, is_causal in {true, false}, scale in {1, 0.5}",
            score="dot(q, k) * scale",
            mask="q_pos - kv_idx < W and (causal or not is_causal)",
        )
    )
    types = {
        node.name: node.type
        for expr in (attention.score, attention.mask)
        for node in walk(expr)
        if isinstance(node, Param)
    }
    assert types == {"W": "int", "is_causal": "bool", "scale": "float"}


def test_a_file_may_redefine_what_the_prelude_defines() -> None:
    program = resolve_text("def causal = kv_idx < q_pos\n" + plain())
    assert show(program.attentions[0].mask) == "kv_idx < q_pos"


def test_names_of_an_attention_hide_defs() -> None:
    attention = attention_of(plain("input window: i32[H]", mask="q_pos - kv_idx < window[h]"))
    assert attention.tensor("window").dtype is DType.I32


def test_unused_names_are_warned_of() -> None:
    program = resolve_text(plain("param W in {1, 2}\n  input doc: i32[B, N]\n  let x = q_idx"))
    assert [d.message for d in program.warnings] == [
        "param 'W' is never used",
        "input 'doc' is never used",
        "let 'x' is never used",
    ]


def test_group_of_grouped_queries_is_a_tree() -> None:
    attention = spec("causal_gqa")
    assert attention.heads_q == Binary("*", Dim("Hkv"), Dim("G"))
    assert attention.heads_kv == Dim("Hkv")
    assert attention.group == Dim("G")
    assert attention.batch == Dim("B")
