"""Every target has its parts in all layers."""

from __future__ import annotations

import pytest

from attnc.build import add_schedules, front
from attnc.model.attention import Variant
from attnc.model.configs import configs
from attnc.model.program import Program
from attnc.model.variants import variants
from attnc.plan.checks import check_lowerable
from attnc.plan.targets import TARGETS, USUAL, complete_schedule, schedule_for, target_of
from attnc.runtime.toolchains import toolchain_of
from attnc.target.files import render_files
from attnc.verify.runners import runner_of
from tests.model.resolving import resolve_text
from tests.plan.planning import planned
from tests.plans import SPECS
from tests.verify.judging import modules_of


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_a_toolchain_a_runner_and_text(name: str) -> None:
    assert TARGETS[name].name == name
    assert TARGETS[name].devices
    assert toolchain_of(name).package in ("triton", "cupy")
    assert runner_of(name).device(name) in ("cpu", "cuda")
    module = planned(schedule="tile.q = 128, tile.kv = 64", target=name)
    first, *others = render_files(module, path="a.attn", sha256="0")
    assert first == f"{module.variant.name}.py"
    assert all(other.startswith(module.variant.name) for other in others)


def test_a_target_that_is_not_compiled_is_a_mistake_with_names() -> None:
    with pytest.raises(ValueError, match=r"expected one of cuda\.sm_100, .*, triton, got 'cuda\.sm_79'"):
        target_of("cuda.sm_79")


@pytest.mark.parametrize(
    ("keys", "deterministic", "added"), [(1, False, ("dk", "dv")), (1, True, ()), (16, False, ())]
)
def test_gradients_of_selected_keys_are_added_as_they_come_where_bits_may_differ(
    keys: int, deterministic: bool, added: tuple[str, ...]
) -> None:
    body = SELECTED.replace("KEYS", str(keys))
    text = schedule_for(resolve_text(body), "a", "triton", deterministic=deterministic)
    (module,) = modules_of(f"{body}\n{text}")
    assert [kernel.adds for kernel in module.backward_kernels.values()] == ([added] if added else [(), ()])


SELECTED = """attention a {
  input q: bf16[B, M, G, 64]
  input k, v: bf16[B, N, 1, 64]
  input idx: i32[B, M, S]
  score = dot(q, k)
  mask = listed(idx, rows = 1, keys = KEYS)
  normalize = softmax
  output o: bf16[B, M, G, 64]
  grad q, k, v
}"""


@pytest.mark.parametrize(("deterministic", "way"), [(True, "ordered"), (False, "atomic")])
def test_variants_sum_dq_each_in_its_way(deterministic: bool, way: str) -> None:
    program = front(SPECS / "causal_gqa.attn")
    text = schedule_for(program, "causal_gqa", "cuda.sm_90a", deterministic=deterministic)
    found = [line.split("{")[0].split()[1:] for line in text.splitlines() if f"accumulate.dq = {way}" in line]
    conditions = {" ".join(words) for words in found}
    assert conditions == {f"T == {dtype} and D == {d}" for dtype in ("bf16", "f16") for d in (64, 128)}


@pytest.mark.parametrize(("deterministic", "way"), [(True, "ordered"), (False, "atomic")])
def test_dq_of_packed_sequences_is_added_in_memory_on_hopper(deterministic: bool, way: str) -> None:
    program = front(SPECS / "varlen.attn")
    text = schedule_for(program, "varlen", "cuda.sm_90a", deterministic=deterministic)
    assert f"accumulate.dq = {way}" in text
    assert "accumulate.dq" not in schedule_for(program, "varlen", "cuda.sm_80", deterministic=deterministic)


@pytest.mark.parametrize(
    ("target", "backward", "way"),
    [
        ("cuda.sm_90a", "", "ordered"),
        ("cuda.sm_90a", "backward { order = longest_first }", "ordered"),
        ("cuda.sm_90a", "backward { accumulate.dq = atomic }", "atomic"),
        ("cuda.sm_90a", "backward { config accumulate.dq = two_pass }", "two_pass"),
        ("cuda.sm_90a", "backward { stages = 2 }", "two_pass"),
        ("cuda.sm_90a", "backward { dkdv { tile.q = 128 } }", "two_pass"),
        ("cuda.sm_90a", "backward { dq { stages = 2 } }", "two_pass"),
        ("cuda.sm_90a", "backward { dkdv { where stages == 2 } }", "two_pass"),
        ("cuda.sm_80", "", "two_pass"),
        ("triton", "", "two_pass"),
    ],
)
def test_what_a_schedule_leaves_open_is_the_fastest_deterministic_way(
    target: str, backward: str, way: str
) -> None:
    program, variant = scheduled("grad q, k, v", backward, target)
    schedule = complete_schedule(variant, program.schedules[0])
    assert [config.accumulate("q") for config in configs(schedule, "backward", variant)] == [way]


@pytest.mark.parametrize("grads", ["", "grad k, v"])
def test_what_has_no_gradient_of_q_leaves_it_by_two_pass(grads: str) -> None:
    program, variant = scheduled(grads, "", "cuda.sm_90a")
    assert "backward" not in complete_schedule(variant, program.schedules[0]).knobs


def test_the_gradient_of_a_sink_leaves_the_others_their_sum() -> None:
    program, variant = scheduled("grad q, k, v, sink", "", "cuda.sm_90a")
    schedule = complete_schedule(variant, program.schedules[0])
    assert [config.accumulate("q") for config in configs(schedule, "backward", variant)] == ["ordered"]


def scheduled(grads: str, backward: str, target: str) -> tuple[Program, Variant]:
    text = f"""attention it {{
  input q: bf16[B, M, H, 64]
  input k, v: bf16[B, N, H, 64]
  input sink: f32[H]
  score = dot(q, k) / sqrt(D)
  mask = causal
  normalize = softmax{"(sink = sink[h])" if "sink" in grads else ""}
  output o: bf16[B, M, H, 64]
  {grads}
}}
schedule it for {target} {{ {backward} }}
"""
    program = resolve_text(text)
    (variant,) = variants(program, program.attention("it"))
    return program, variant


PAGED, LENGTH = "via paged(table, page = 16)", "input lens: i32[B]\n  length N = lens[b]"
TABLE = f"input table: i32[B, P]\n  {LENGTH}"
ROWS, PACKED = "bf16[B, M, Hkv * G, 128]", "bf16[T, Hkv * G, 128]"
NARROW_CACHE = """attention cache {{
  {params}
  input q: {q}
  input k, v: {kv}[B, N, Hkv, 128] {where}
  {more}
  score = dot(q, k{scale})
  normalize = softmax
  output o: {o}
}}
"""


@pytest.mark.parametrize(
    ("change", "labels"),
    [
        ({}, ["tiles", "before"]),
        ({"params": "param T in {bf16, i8}", "kv": "T"}, ["tiles", "before"]),
        ({"where": "", "more": LENGTH}, ["tiles", "before"]),
        ({"where": "", "more": f"{LENGTH}\n  grad q"}, [""]),  # kernels of gradients read 16 bits
        ({"more": f"{TABLE}\n  grad q"}, ["tiles", "before"]),  # in pages there are none
        ({"kv": "bf16"}, [""]),
        ({"where": "", "more": ""}, [""]),  # all keys are the call's, and are converted before
        ({"more": f"{TABLE}\n  input s: f32[Hkv, 128]", "scale": " * s[h // G, d]"}, [""]),
        ({"q": f"{PACKED} via ragged(cu)", "o": PACKED, "more": f"{TABLE}\n  input cu: i32[B + 1]"}, [""]),
    ],
    ids=str,
)
def test_a_cache_of_8_bits_gets_a_schedule_for_short_and_for_long_calls(
    change: dict[str, str], labels: list[str]
) -> None:
    known = {"params": "", "q": ROWS, "o": ROWS, "kv": "e4m3", "where": PAGED, "scale": "", "more": TABLE}
    text = NARROW_CACHE.format(**{**known, **change})
    program = resolve_text(text)
    schedules = schedule_for(program, "cache", "cuda.sm_90a")
    made = resolve_text(f"{text}\n{schedules}").schedules
    assert [schedule.label for schedule in made] == labels
    assert schedule_for(program, "cache", "triton").count("schedule") == 1


@pytest.mark.parametrize(
    ("heads", "keys", "more", "unites"),
    [
        ("16", 1, "", True),
        ("32", 1, "", True),
        ("33", 1, "", False),
        ("G", 1, "", False),
        ("16", 64, "", True),
        ("16", 24, "", False),
        ("16", 1, "input m: i32[B]\n  length M = m[b]", False),
    ],
)
def test_queries_of_few_heads_share_tiles_without_a_schedule(
    heads: str, keys: int, more: str, unites: bool
) -> None:
    program = resolve_text(f"""attention a {{
  input q: bf16[B, M, {heads}, 576]
  input k: bf16[B, N, 1, 576]
  input v: bf16[B, N, 1, 512] via prefix(k)
  input idx: i32[B, M, S]
  {more}
  score = dot(q, k)
  mask = listed(idx, rows = 1, keys = {keys})
  normalize = softmax
  output o: bf16[B, M, {heads}, 512]
}}
""")
    assert ("lists = union" in schedule_for(program, "a", "cuda.sm_90a")) == unites


WIDTHS = """
attention wide_too {{
  param D in {{{widths}}}
  input q: bf16[B, M, Hkv * G, D]
  input k, v: bf16[B, N, Hkv, D]
  score = dot(q, k) / sqrt(D)
  mask = causal
  normalize = softmax
  output o: bf16[B, M, Hkv * G, D]
  {grads}
}}
"""


OF_WIDTHS = [
    ("320, 512", "cuda.sm_90a", ""),
    *(("128, 512", target, grads) for target in USUAL for grads in ("", "grad q, k, v")),
]


@pytest.mark.parametrize(("widths", "target", "grads"), OF_WIDTHS)
def test_wide_rows_among_the_variants_need_no_schedule(widths: str, target: str, grads: str) -> None:
    program = resolve_text(WIDTHS.format(widths=widths, grads=grads))
    added = add_schedules(program, schedule_for(program, "wide_too", target))
    found = [*variants(added, added.attention("wide_too"))]
    assert len(found) == 2
    for variant in found:
        schedule = complete_schedule(variant, added.schedules[0])
        assert not [*check_lowerable(variant, schedule)]
        assert target_of(target).configs(variant, schedule)
