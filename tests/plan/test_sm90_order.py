"""Sums in an absolute order on Hopper: tiles, what kernels leave out for them, and what is refused."""

import pytest

from attnc.diagnostics import DiagnosticError
from attnc.expr.nodes import show
from attnc.plan.ir import Forward
from attnc.plan.order import explain_order
from attnc.plan.sm90 import decode_layout_of, layout_of, roles_of
from tests.verify.judging import modules_of

SPEC = """
attention a {{
  input q: {dtype}[B, M, {heads}, {d}]
  input k: {cached}[B, N, Hkv, {d}]
  input v: {cached}[B, N, Hkv, {dv}]{part}
  {extra}
  score = {score}
  mask = {mask}
  normalize = {softmax}
  {order}
  output o: {dtype}[B, M, {heads}, {dv}]
}}

schedule a for cuda.sm_90a as prompt {{
  {prompt}
}}

schedule a for cuda.sm_90a as decode {{
  loops = [kv], pack = gqa, split.kv = fixed(1024){decode}
}}
"""
LAZY = "softmax = online(maximum = lazy(20))"


def spec(prompt: str = "", decode: str = "", **changes: str) -> str:
    fields = {
        "dtype": "bf16",
        "heads": "Hkv * G",
        "d": "64",
        "part": "",
        "extra": "",
        "score": "dot(q, k) / 8",
        "mask": "causal",
        "softmax": "softmax",
        "order": "order = absolute(1024)",
        **changes,
    }
    fields = {"dv": fields["d"], "cached": fields["dtype"], **fields}
    return SPEC.format(**fields, prompt=prompt, decode=decode and f", {decode}")


@pytest.mark.parametrize(
    ("d", "dv", "keys"), [("64", "64", 128), ("128", "128", 128), ("192", "128", 64), ("192", "192", 32)]
)
def test_prompts_and_decode_steps_have_the_same_keys_in_a_tile(d: str, dv: str, keys: int) -> None:
    prompt, decode = modules_of(spec(d=d, dv=dv))
    assert [config.tile_kv for config in (*prompt.kernel.configs, *decode.kernel.configs)] == [keys, keys]


def test_tiles_divide_segments() -> None:
    text = spec(decode="tile.kv = 16", order="order = absolute(48)").replace("1024", "48")
    assert {module.kernel.configs[0].tile_kv for module in modules_of(text)} == {16}


def test_the_sums_of_segments_lie_in_shared_memory() -> None:
    ordered, plain = (
        layout_of(modules_of(text)[0].kernel) for text in (spec(), spec(order="").replace("fixed(1024)", "1"))
    )
    config = modules_of(spec())[0].kernel.configs[0]
    assert ordered.shared_memory(config)["sums"] == config.tile_q * 64 * 4
    assert "sums" not in plain.shared_memory(config)


def test_a_score_is_computed_as_decode_kernels_do() -> None:
    score, extra = "dot(q, k) / 8 + alibi(slope[h])", "input slope: f32[H]"
    ordered, plain = (
        modules_of(spec(LAZY, decode, score=score, extra=extra, order=order).replace(*split))[0].kernel
        for order, split, decode in (
            ("order = absolute(1024)", ("", ""), LAZY),
            ("", ("fixed(1024)", "1"), ""),
        )
    )
    assert isinstance(ordered, Forward)
    assert isinstance(plain, Forward)
    made = roles_of(ordered).softmax.score
    assert made is not None
    assert ordered.step.score is not None
    assert show(made.value) == show(ordered.step.score)
    assert (made.columns, made.rows, made.keys) == ((), (), ())
    assert roles_of(plain).softmax.score is not None
    assert layout_of(plain).columns == 1
    assert layout_of(ordered).columns == 0


def test_a_cap_is_no_polynomial() -> None:
    ordered = modules_of(spec(LAZY, LAZY, score="softcap(dot(q, k) / 8, 30)"))[0]
    assert not layout_of(ordered.kernel).capped


def test_decode_kernels_have_two_blocks_or_as_many_bytes_on_their_way() -> None:
    for d, stages in (("64", 3), ("128", 3)):
        kernel = modules_of(spec(d=d))[1].kernel
        assert kernel.configs[0].stages == stages
        assert decode_layout_of(kernel).consumers == 1


def test_the_argument_says_what_the_maximum_is() -> None:
    lazy, eager = ([*explain_order(modules_of(text)[1])] for text in (spec(LAZY, LAZY), spec()))
    assert any("of its first tile of a segment" in line for line in lazy)
    assert any("looked for in every tile" in line for line in eager)
    for lines in (lazy, eager):
        assert any(
            line.endswith("tile.kv = 128; wgmma.m64nNk16 adds 16 columns, or keys, at a time, in their order")
            for line in lines
        )
        assert lines[0].endswith("from the last to the first")


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (
            {"softmax": "softmax(dropout = 0.1, seed = s)", "extra": "input s: i64[]"},
            "E0602",
            "dropout beside 'order = absolute'",
        ),
        ({"cached": "e4m3"}, "E0602", "keys of 8 bits have no absolute order on Hopper"),
        ({"d": "256"}, "E0602", "these heads have no absolute order on Hopper"),
        ({"d": "256", "dv": "64"}, "E0602", "these heads have no absolute order on Hopper"),
        ({"decode": "warp_split = kv"}, "E0605", "each warp has keys of its own"),
        ({"decode": "tile.kv = 64"}, "E0605", "schedules have 'tile.kv = 128' and 'tile.kv = 64'"),
        ({"prompt": LAZY}, "E0605", "maximum = lazy(threshold = 20.0))' and 'softmax = online"),
        (
            {"decode": "tile.kv = 96", "prompt": "tile.kv = 96"},
            "E0605",
            "segments of 1024 keys are not made of",
        ),
    ],
)
def test_what_breaks_the_order_is_refused_where_it_stands(
    changes: dict[str, str], code: str, said: str
) -> None:
    with pytest.raises(DiagnosticError) as refused:
        modules_of(spec(**changes))
    found = [(one.code, one.message) for one in refused.value.diagnostics]
    assert any(at == code and said in message for at, message in found), found
