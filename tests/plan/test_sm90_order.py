"""Sums in an absolute order on Hopper: tiles, what kernels leave out for them, and what is refused."""

import pytest

from attnc.diagnostics import DiagnosticError
from attnc.expr.nodes import show
from attnc.plan.ir import Decode, Forward
from attnc.plan.order import explain_order, sums_in_order
from attnc.plan.sm90 import decode_layout_of, layout_of, roles_of
from attnc.target.files import render_files
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
    ("d", "dv", "keys"),
    [
        ("64", "64", 128),
        ("128", "128", 128),
        ("192", "128", 64),
        ("192", "192", 32),
        ("256", "256", 64),
        ("512", "512", 32),
    ],
)
def test_prompts_and_decode_steps_have_the_same_keys_in_a_tile(d: str, dv: str, keys: int) -> None:
    prompt, decode = modules_of(spec("loops = [kv], pack = gqa" if d == "512" else "", d=d, dv=dv))
    assert [config.tile_kv for config in (*prompt.kernel.configs, *decode.kernel.configs)] == [keys, keys]


@pytest.mark.parametrize(
    ("d", "keys", "stages"), [("64", 128, 2), ("96", 128, 1), ("128", 128, 1), ("192", 32, 2), ("256", 64, 1)]
)
def test_tiles_of_8_bits_take_the_room_of_a_second_stage(d: str, keys: int, stages: int) -> None:
    """Whether a prompt converts tiles or not, it has as many keys in one as decode steps."""
    tiles, decode = modules_of(spec("convert = tiles", d=d, cached="e4m3"))
    before, _ = modules_of(spec("convert = before", d=d, cached="e4m3"))
    configs = [module.kernel.configs[0] for module in (tiles, decode, before)]
    assert [config.tile_kv for config in configs] == [keys] * 3
    assert configs[0].stages == stages
    assert isinstance(tiles.kernel, Forward)
    assert roles_of(tiles.kernel).values_come_late is (stages == 1)


def test_decode_steps_of_scaled_8_bits_have_room_for_one_stage() -> None:
    extra = "input scale: f32[B, N, Hkv, 8]"
    of_column = "scale[b, kv_idx, h // G, d // 32]"
    changes = {
        "extra": extra,
        "score": f"dot(q, k * {of_column}) / 8",
        "softmax": f"softmax(v_scale = {of_column})",
    }
    prompt, decode = modules_of(spec(d="256", cached="e4m3", **changes))
    assert [module.kernel.configs[0].tile_kv for module in (prompt, decode)] == [64, 64]
    assert decode.kernel.configs[0].stages == 1


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


@pytest.mark.parametrize(("d", "kept"), [("192", True), ("256", False)])
def test_the_sums_of_wide_heads_lie_in_memory(d: str, kept: bool) -> None:
    module = modules_of(spec(d=d))[0]
    files = render_files(module, path="a.attn", sha256="")
    assert layout_of(module.kernel).keeps_sums is kept
    declared = "multiprocessors()) * BLOCK_M * 256 * (N > 1024)" in "".join(files.values())
    assert declared is not kept


LATENT = {"heads": "H", "d": "576", "dv": "512", "part": " via prefix(k)"}
#: A prompt of latent attention, whose kernel is that of decode steps.
WALK = "loops = [kv], pack = gqa"


def latent(prompt: str = WALK, decode: str = "", **changes: str) -> str:
    text = spec(prompt, decode, **LATENT, **changes)
    return text.replace("B, N, Hkv", "B, N, 1")


def test_a_prompt_of_latents_walks_over_all_segments_of_its_rows() -> None:
    prompt, decode = (module.kernel for module in modules_of(latent()))
    assert isinstance(prompt, Decode)
    assert isinstance(decode, Decode)
    assert prompt.segments is not None
    assert (prompt.segments.size, prompt.split) == (1024, None)
    assert decode.segments is None
    assert decode.split is not None
    assert decode.split.segment == 1024
    assert sums_in_order(prompt)
    assert sums_in_order(decode)


def test_the_argument_says_who_joins_the_segments_of_latents() -> None:
    prompt, decode = (next(iter(explain_order(module))) for module in modules_of(latent()))
    assert prompt.endswith("one after the other, from the last to the first")
    assert decode.endswith("a program each, joined by another kernel, from the last to the first")


def test_warpgroups_hand_on_the_denominator_and_share_no_columns_with_other_blocks() -> None:
    for module in modules_of(latent()):
        layout = decode_layout_of(module.kernel)
        config = module.kernel.configs[0]
        assert layout.shared_memory(config)["statistics"] == 2 * (64 + 64 * 4) * 4
        assert [one.tile_d for one in module.kernel.configs] == [512]
        assert sum(layout.shared_memory(config).values()) <= layout.room


def test_sums_of_a_prompt_of_latents_take_memory_where_there_are_several_segments() -> None:
    prompt, decode = (render_files(module, path="a.attn", sha256="") for module in modules_of(latent()))
    size = "multiprocessors() * BLOCK_M * 512 * (N > 1024)"  # of the blocks that run at once
    assert f'"_sums": "{size}"' in prompt["prompt.py"]
    assert "_sums" not in "".join(decode.values())


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


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"decode": "tile.d = 256"}, "E0605", "'tile.d' breaks 'order = absolute': columns are added in"),
        ({"prompt": f"{WALK}, tile.d = 256"}, "E0605", "'tile.d' breaks 'order = absolute'"),
        ({"prompt": f"{WALK}, split.kv in {{1, 4}}"}, "E0605", "splits are not segments"),
        ({"prompt": f"{WALK}, tile.kv = 32"}, "E0605", "schedules have 'tile.kv = 32' and 'tile.kv = 64'"),
        ({"decode": LAZY}, "E0602", "the decode kernel has no lazy maximum"),
        (
            {"mask": "causal and (q_pos - kv_idx) % 3 == 0"},
            "E0602",
            "a mask with gaps beside 512 columns has no",
        ),
    ],
)
def test_what_breaks_the_order_of_latents_is_refused(changes: dict[str, str], code: str, said: str) -> None:
    with pytest.raises(DiagnosticError) as refused:
        modules_of(latent(**changes))
    found = [(one.code, one.message) for one in refused.value.diagnostics]
    assert any(at == code and said in message for at, message in found), found


def test_two_warpgroups_would_add_columns_of_narrow_latents_in_another_order() -> None:
    text = spec(decode="consumers = 2", heads="H", d="192", dv="128", part=" via prefix(k)")
    with pytest.raises(DiagnosticError, match="'consumers' breaks 'order = absolute'"):
        modules_of(text.replace("B, N, Hkv", "B, N, 1"))
