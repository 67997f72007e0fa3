"""How Hopper's kernels for gradients lie whose sums two warpgroups share, and which there are."""

from __future__ import annotations

import pytest

from attnc.model.attention import Attention
from attnc.model.variants import variants
from attnc.plan.device import DEVICES
from attnc.plan.ir import Module
from attnc.plan.layout import KernelName
from attnc.plan.signature import normalise
from attnc.plan.sm90.latent import (
    LatentBackward,
    SharedProducts,
    WideBackward,
    refuse_latent_gradients,
    refuse_wide_gradients,
    share_products,
    shares_wide_gradients,
)
from attnc.plan.targets import schedule_for
from tests.model.resolving import resolve_text
from tests.verify.judging import modules_of

SPEC = """attention latent {{
  input q: bf16[B, M, {heads}, {d}]
  input k: bf16[B, N, {shared}, {d}]
  input v: bf16[B, N, {shared}, {dv}] via prefix(k)
  {extra}
  score = {score}
  mask = {mask}
  normalize = {normalize}
  output o: bf16[B, M, {heads}, {dv}]
  grad {grads}
}}
schedule latent for cuda.sm_90a {{
  loops = [kv], pack = gqa, tile.kv = 64
}}
"""
USUAL = {
    "heads": "G",
    "shared": "1",
    "d": "576",
    "dv": "512",
    "extra": "",
    "score": "dot(q, k) / 8",
    "mask": "causal",
    "normalize": "softmax",
    "grads": "q, k",
}


def planned(**words: str) -> Module:
    """The module of multi-head latent attention with gradients: words of `USUAL`."""
    (module,) = modules_of(SPEC.format(**{**USUAL, **words}))
    return module


def layout_of(module: Module) -> LatentBackward:
    assert module.backward is not None
    assert isinstance(module.backward.layout, LatentBackward)
    return module.backward.layout


def attention(**words: str) -> Attention:
    program = resolve_text(SPEC.format(**{**USUAL, **words}))
    (variant,) = variants(program, program.attentions[0])
    return normalise(variant.attention)


@pytest.mark.parametrize(("d", "dv", "first"), [(128, 64, 1), (192, 128, 1), (576, 512, 4)])
def test_two_warpgroups_share_the_columns_of_the_sums(d: int, dv: int, first: int) -> None:
    module = planned(d=str(d), dv=str(dv))
    layout = layout_of(module)
    assert layout.by_wgmma == {"dq", "dk"}
    assert layout.first_panels("dq") == first
    kernels: tuple[KernelName, ...] = ("dq", "dk")
    for name in kernels:
        registers = layout.registers(module.backward_kernels[name].configs[0], name)
        # of the warpgroup with more columns, which 128 threads hold for 64 rows
        assert registers[name] == 64 * (d - 64 * first) // 128
        assert sum(registers.values()) < 255


@pytest.mark.parametrize(("kernel", "tile"), [("dq", (64, 32)), ("dk", (32, 64))])
def test_the_kept_tile_has_64_rows_and_32_come_by(kernel: KernelName, tile: tuple[int, int]) -> None:
    module = planned()
    layout, planned_kernel = layout_of(module), module.backward_kernels[kernel]
    config = planned_kernel.configs[0]
    assert layout.tile(kernel) == tile
    buffers = layout.shared_memory(config, kernel)
    # two tiles come by at once: of keys, or of queries with do
    assert buffers["q"] == buffers["k"] == 64 * 576 * 2
    assert buffers["do"] == 64 * 512 * 2
    assert (buffers["p"], buffers["ds"]) == (64 * 32 * 4, 64 * 32 * 2)
    assert ("rows" in buffers) == (kernel == "dk")
    assert planned_kernel.shared[0] == sum(buffers.values()) <= DEVICES["sm_90"].shared_per_block


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"d": "128", "dv": "64"},
        {"d": "640", "dv": "384"},
        {"heads": "H", "shared": "H", "mask": "kv_idx <= q_pos + h"},
        {"extra": "input w: f32[G]", "score": "dot(q, k) + w[h]"},
    ],
    ids=lambda words: ", ".join(words) or "usual",
)
def test_there_are_kernels(words: dict[str, str]) -> None:
    assert refuse_latent_gradients(attention(**words)) == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"normalize": "none"}, "these kernels make p from the score and lse"),
        ({"d": "568"}, "568 and 512 columns are no multiples of 64"),
        ({"dv": "504"}, "576 and 504 columns are no multiples of 64"),
        ({"d": "64", "dv": "64"}, "two warpgroups share 128 to 640 columns of sums, not 64"),
        ({"d": "704"}, "two warpgroups share 128 to 640 columns of sums, not 704"),
        ({"d": "640", "dv": "512"}, "tiles of 640 and 512 columns need 243200 B of shared memory"),
        (
            {"score": "softcap(dot(q, k), 20)"},
            "of ds, p is one factor, and the other a constant here: no soft caps, no dropout",
        ),
        (
            {
                "extra": "input p: f32[]\n  input seed: i64[]",
                "normalize": "softmax(dropout = p, seed = seed)",
            },
            "of ds, p is one factor, and the other a constant here: no soft caps, no dropout",
        ),
        (
            {"extra": "input w: f32[G]", "score": "dot(q, k) + w[h]", "grads": "q, k, w"},
            "these kernels make the gradients of q and k alone",
        ),
        ({"mask": "kv_idx <= q_pos + h"}, "one mask for all heads that share the keys"),
    ],
)
def test_why_there_are_none(words: dict[str, str], told: str) -> None:
    assert refuse_latent_gradients(attention(**words)) == told


#: Values of their own.
APART = {"heads": "Hkv * G", "shared": "Hkv", "d": "512", "dv": "512", "grads": "q, k, v"}


def of_wide_heads(**words: str) -> str:
    text = SPEC.replace(" via prefix(k)", "").replace(", tile.kv = 64", "")
    return text.format(**{**USUAL, **APART, **words})


def wide_attention(**words: str) -> Attention:
    program = resolve_text(of_wide_heads(**words))
    (variant,) = variants(program, program.attentions[0])
    return normalise(variant.attention)


@pytest.mark.parametrize(("d", "dv"), [(512, 512), (320, 128), (128, 384)])
@pytest.mark.parametrize("kernel", ["dq", "dk", "dv"])
def test_wide_heads_have_three_kernels_that_fit(d: int, dv: int, kernel: KernelName) -> None:
    (module,) = modules_of(of_wide_heads(d=str(d), dv=str(dv)))
    layout = layout_of(module)
    assert isinstance(layout, WideBackward)
    assert set(module.backward_kernels) >= {"dq", "dk", "dv"}
    planned_kernel = module.backward_kernels[kernel]
    config = planned_kernel.configs[0]
    buffers = layout.shared_memory(config, kernel)
    assert planned_kernel.shared[0] == sum(buffers.values()) <= DEVICES["sm_90"].shared_per_block
    # 64 rows stay, two tiles of 32 come by, and of what dp is made of six times 64 columns
    pieces = 6 * 32 * 64 * 2
    assert buffers["q"] == buffers["k"] == 64 * d * 2
    expected = {"dq": (64 * dv * 2, pieces), "dk": (pieces, 64 * dv * 2), "dv": (64 * dv * 2, None)}
    assert (buffers["do"], buffers.get("v")) == expected[kernel]
    assert "ds" not in buffers  # it goes where p was
    width = dv if kernel == "dv" else d
    assert layout.registers(config, kernel)[kernel] == 32 * (width // 64 - width // 128)


def test_wide_heads_have_gradients_without_a_word_in_the_schedule() -> None:
    text = of_wide_heads().partition("schedule")[0]
    program = resolve_text(text)
    schedule = schedule_for(program, "latent", "cuda.sm_90a")
    assert "loops = [kv]" in schedule
    (module,) = modules_of(text + schedule)
    assert isinstance(layout_of(module), WideBackward)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"d": "256", "dv": "256"}, "the decode kernel has no backward"),
        ({"d": "64"}, "two warpgroups share 72 to 512 columns, not 64 and 512"),
        ({"dv": "576"}, "two warpgroups share 72 to 512 columns, not 512 and 576"),
        (
            {"extra": "input w: f32[G]", "score": "dot(q, k) + w[h]", "grads": "q, k, w"},
            "gradients of what the score reads have 288 columns at most, not 512",
        ),
        (
            {"extra": "input s: f32[G]", "normalize": "softmax(sink = s[h])", "grads": "s"},
            "of more than 288 columns other gradients come beside those of q, k or v",
        ),
    ],
)
def test_why_wide_heads_have_no_gradients(words: dict[str, str], told: str) -> None:
    assert refuse_wide_gradients(wide_attention(**words)) == told
    assert refuse_wide_gradients(wide_attention()) == ""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("words", "shared"),
    [
        ({}, True),
        ({"d": "504", "dv": "264"}, True),
        ({"normalize": "none"}, True),
        ({"normalize": "softpick"}, True),
        ({"extra": "input draws: i64[]", "normalize": "softmax(dropout = 0.5, seed = draws)"}, True),
        ({"score": "softcap(dot(q, k), 20)"}, True),
        ({"score": "softcap(dot(q, k), 20)", "normalize": "softpick"}, False),
        ({"normalize": "stick_breaking"}, False),
        ({"mask": "kv_idx <= q_pos + h"}, False),
        (
            {
                "extra": "input w: f32[G]",
                "score": "dot(q, k) + w[h]",
                "grads": "q, k, w",
                "d": "288",
                "dv": "288",
            },
            False,
        ),
    ],
)
def test_which_gradients_of_wide_heads_two_warpgroups_share(words: dict[str, str], *, shared: bool) -> None:
    assert refuse_wide_gradients(wide_attention(**words)) == ""
    assert shares_wide_gradients(wide_attention(**words)) is shared
    (module,) = modules_of(of_wide_heads(**words))
    assert module.backward is not None
    assert isinstance(module.backward.layout, WideBackward) is shared


# --- which products two warpgroups share

SIZES = [(128, 64), (192, 128), (320, 256), (576, 256), (576, 512)]


def products_of(module: Module, kernel: KernelName) -> SharedProducts:
    return share_products(layout_of(module), kernel)


@pytest.mark.parametrize("kernel", ["dq", "dk"])
@pytest.mark.parametrize(("d", "dv"), SIZES)
def test_every_column_is_multiplied_once(kernel: KernelName, d: int, dv: int) -> None:
    """A warpgroup's part begins at its own first panel, and no product crosses the end of the values."""
    products = products_of(planned(d=str(d), dv=str(dv)), kernel)
    shares = (0, products.first_panels * 64)
    for parts, columns in ((products.q_parts, d), (products.do_parts, dv)):
        found: list[int] = []
        for start, share in zip(shares, parts, strict=True):
            for fragment, width, panel in share:
                first = panel * 64
                assert first - start == fragment * 8
                assert width <= 256
                assert not first < dv < first + width
                found += range(first, first + width)
        assert found == list(range(columns))


def test_sums_of_576_columns_are_of_three_products() -> None:
    products = products_of(planned(), "dk")
    assert products.q_parts == (((0, 256, 0),), ((0, 256, 4), (32, 64, 8)))
    assert products.do_parts == (((0, 256, 0),), ((0, 256, 4),))
    assert products.widths == [64, 256]


@pytest.mark.parametrize(("kernel", "columns"), [("dq", 384), ("dk", 384), ("dv", 512)])
def test_sums_of_wide_heads_are_of_one_tensor(kernel: KernelName, columns: int) -> None:
    (module,) = modules_of(of_wide_heads(d="384", dv="512"))
    products = products_of(module, kernel)
    parts, others = (products.do_parts, products.q_parts)[:: 1 if kernel == "dv" else -1]
    assert others == ((), ())
    assert [64 * panel for share in parts for _, _, panel in share] == [0, columns // 2]
    assert sum(width for share in parts for _, width, _ in share) == columns
    assert (products.pieces, products.makes_dv) == ((0, True) if kernel == "dv" else (6, False))
