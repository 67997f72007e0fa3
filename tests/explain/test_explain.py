"""The explanation: its sections, its figures, and that JSON says the same."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnc.build import front, plan_program
from attnc.explain.backward import backward_dict, backward_text, explain_backward
from attnc.explain.forward import Explanation, as_dict, as_text, explain
from attnc.plan.device import DEVICES
from tests.by_day import some_by_day
from tests.plans import SPECS, module_of, plans_of
from tests.targets import TARGETS
from tests.verify.judging import modules_of

GENERATED = SPECS.parent / "generated"


@dataclass(frozen=True)
class Compiled:
    registers: int = 168
    stack: int = 0
    shared: int = 131072


def explained(name: str = "causal_gqa", arch: str = "sm_90") -> Explanation:
    return next(explanations(name, arch))


def explanations(name: str, arch: str = "sm_90") -> Iterator[Explanation]:
    """Of the first module for each target."""
    program = front(SPECS / f"{name}.attn")
    first = {module.target: module for module in reversed(plan_program(program).modules)}
    for module in reversed(first.values()):
        schedule = next(s for s in program.schedules if s.target == module.target)
        yield explain(module, schedule, DEVICES[arch], usage=Compiled())


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "name",
    some_by_day(
        (path.stem for path in sorted(SPECS.glob("*.attn")) if "\nattention " in path.read_text()), of=2
    ),
)
def test_every_spec_can_be_explained(name: str) -> None:
    path = SPECS / f"{name}.attn"
    for found in explanations(path.stem):
        text = as_text(found)
        for section in (
            "grid and loops",
            "mask:",
            "shared memory:",
            "registers:",
            "roofline",
            "error bound",
            "because",
        ):
            assert f"\n{section}" in text
        assert all(len(line) <= 400 for line in text.splitlines())
        if found.module.backward is not None:
            kernels = backward_dict(explain_backward(found.module, DEVICES["sm_90"], {}))
            assert len(kernels) == len(found.module.backward.kernels)


def test_buffers_stand_in_columns() -> None:
    text = as_text(explained())
    after = text.partition("shared memory:")[2].splitlines()[1:]
    buffers = after[: next(i for i, line in enumerate(after) if line.startswith("registers:"))]
    assert len(buffers) >= 3
    assert len({line.index(" B  ") for line in buffers}) == 1


def test_decisions_point_at_spec_lines() -> None:
    e = explained()
    lines = (SPECS / "causal_gqa.attn").read_text().splitlines()
    for decision in as_dict(e)["because"]:
        path, _, line = decision["spec"].rpartition(":")
        assert path.endswith("causal_gqa.attn")
        assert lines[int(line) - 1].strip()
    masks = [d for d in as_dict(e)["because"] if "with mask code" in d["decision"]]
    assert lines[int(masks[0]["spec"].rpartition(":")[2]) - 1].strip().startswith("mask = causal")


def test_what_a_list_names_and_who_shares_it_is_said() -> None:
    text = as_text(next(explanations("selected_rank")))
    assert "single keys that 'selected' lists for every query: 1152 B are gathered for each" in text
    assert "unites the lists of 4 queries, whose heads share a tile" in text
    text = as_text(next(explanations("selected_prompts")))
    assert "lists for every query: 4 in a tile, which visits those of any" in text


def test_what_becomes_rows_of_memory_is_explained() -> None:
    text = as_text(next(explanations("selected_pages")))
    assert "finds the sequence of a packed query, drops keys that the rest of the mask forbids" in text


def test_figures_of_a_causal_kernel() -> None:
    data = json.loads(json.dumps(as_dict(explained())))
    assert data["pictures"][0]["M"] == 512
    buffers = data["shared_memory"]["buffers"]
    assert sum(buffers.values()) == data["shared_memory"]["total"] <= data["shared_memory"]["limit"]
    assert data["compiled"] == {"registers": 168, "stack": 0, "shared": 131072}
    roofline = data["roofline"]
    # 16k tokens, hidden size 2048, causal: half of 4 B H N^2 D, and the diagonal's tiles
    assert roofline["flops"] == pytest.approx(0.5 * 4 * 16384 * 4096 * 2048, rel=0.05)
    assert roofline["bound"] == "tensor cores"
    assert data["error_bound"]["p_roundoff"] == 2.0**-8


@pytest.mark.one_in(10)
@pytest.mark.parametrize("name", some_by_day((path.stem for path in sorted(SPECS.glob("*.attn"))), of=2))
def test_every_backward_can_be_explained(name: str) -> None:
    path = SPECS / f"{name}.attn"
    for module in plans_of(path).modules:
        found = explain_backward(module, DEVICES["sm_90"], {}, length=512)
        text = backward_text(found)
        for name, e in zip(module.backward_kernels, found, strict=True):
            assert f"backward kernel {name}, config {e.position} of " in text
        assert len(backward_dict(found)) == text.count("roofline at M = N = 512")


def test_figures_of_a_backward() -> None:
    module = plans_of("full").modules[0]
    found = explain_backward(module, DEVICES["sm_90"], {"dq": Compiled()})
    dq, dkdv = json.loads(json.dumps(backward_dict(found)))
    whole = 16384 * 4096 * 2048
    assert dq["roofline"]["flops"] == pytest.approx(6 * whole)  # S, dP, dQ
    assert dkdv["roofline"]["flops"] == pytest.approx(8 * whole)  # S, dP, dK, dV


def test_a_stick_takes_two_exponentials_of_each_score_and_its_gradients_more() -> None:
    explanation = explained("stick_breaking")
    forward = as_dict(explanation)["roofline"]
    dq, dkdv = backward_dict(explain_backward(explanation.module, DEVICES["sm_90"], {}))
    found = [(forward, 2, 2), (dq["roofline"], 3, 4), (dkdv["roofline"], 4, 3)]  # products, exponentials
    for roofline, products, exponentials in found:
        scores = roofline["flops"] / (2 * 128 * products)
        assert roofline["exponentials"] == pytest.approx(exponentials * scores)


LATENT = """attention latent {
  input q: bf16[B, M, H, 96]
  input k: bf16[B, N, 1, 96]
  input v: bf16[B, N, 1, 64] via prefix(k)
  input idx: i32[B, M, S]
  score = dot(q, k)
  mask = listed(idx, rows = 1, keys = 1)
  normalize = softmax
  output o: bf16[B, M, H, 64]
  grad q, k
}
schedule latent for triton {
  loops = [kv], pack = gqa
  backward { accumulate.dk = atomic, tile.q = 16, tile.kv = 16 }
}
"""


def test_sums_that_are_added_to_in_any_order_are_named() -> None:
    """With what they cost: S, dP, dQ, and in dK rows of both dO and Q."""
    (module,) = modules_of(LATENT)
    found = explain_backward(module, DEVICES["sm_90"], {})
    text = backward_text(found)
    assert "take M * B queries one after the other, 16 heads at a time, and add to dk" in text
    assert "accumulate.dk = atomic: blocks add to it in any order: bits differ from run to run" in text
    (kernel,) = backward_dict(found)
    heads, rest = divmod(kernel["roofline"]["flops"], 2 * 4096 * 4096 * (96 + 64 + 96 + 96 + 64))
    assert heads >= 1
    assert rest == 0


def test_a_kernel_that_multiplies_what_another_keeps_evaluates_no_mask() -> None:
    (module,) = modules_of(LATENT.replace("accumulate.dk = atomic, ", ""))
    dq, dk = backward_text(explain_backward(module, DEVICES["sm_90"], {})).split("\n\n")
    assert "which keep p and ds of each key for the next kernel" in dq
    assert "partial tiles, mask evaluated" in dq
    assert "p and ds that the kernel before it keeps, no mask code" in dk
    for text in (dq, dk):  # here all keys are listed
        visited = re.search(r", (\d+) of (\d+) tiles visited", text)
        assert visited is not None
        assert visited[1] == visited[2]


@pytest.mark.parametrize("target", TARGETS)
def test_packed_sequences_are_explained_with_the_grid_that_is_launched(target: str) -> None:
    module = module_of("varlen", target)
    launched = (GENERATED / "varlen" / target.replace(".", "_") / "d128.py").read_text(encoding="utf-8")
    tile = module.kernel.configs[0].tile_q
    schedule = next(s for s in front(SPECS / "varlen.attn").schedules if s.target == target)
    text = as_text(explain(module, schedule, DEVICES["sm_90"]))
    assert f"of a sequence, and head: (T // {tile} + B + 1) * H" in text
    assert "(T // BLOCK_M + B + 1) * H" in launched
    dq, dkdv = backward_dict(explain_backward(module, DEVICES["sm_90"], {}))
    tile_q, tile_kv = dq["config"]["tile.q"], dkdv["config"]["tile.kv"]
    assert f"(T // {tile_q} + B + 1) * H" in dq["grid"]
    assert f"(S // {tile_kv} + B + 1) * Hkv" in dkdv["grid"]
    assert "(S // BLOCK_N + B + 1) * Hkv" in launched


def test_a_backward_for_a_smaller_device_takes_a_config_that_fits() -> None:
    module = plans_of("causal_gqa").modules[0]
    here, there = (explain_backward(module, DEVICES[arch], {}) for arch in ("sm_90", "sm_86"))
    assert [e.position for e in here] == [0, 0]
    assert there[0].position == 1
    assert all(e.needs.shared <= DEVICES["sm_86"].shared_per_block for e in there)


def test_a_window_spares_a_decode_step_the_keys_before_it(tmp_path: Path) -> None:
    """What no row sees is not read, and bounds no launch."""
    spec = tmp_path / "windowed.attn"
    spec.write_text((SPECS / "unified_decode.attn").read_text().replace(" causal", " window(128, 0)"))
    program = front(spec)
    module = plan_program(program).modules[0]
    e = explain(module, program.schedules[0], DEVICES["sm_90"], usage=None)
    tile = e.roofline.picture.tile_kv
    read = e.roofline.picture.keys_read
    assert 129 <= read <= 129 + 2 * tile
    assert as_dict(e)["roofline"]["bytes"] == 32 * 2 * (2 * read * 128 + 2 * 128)


def test_a_scale_of_v_is_part_of_the_bound() -> None:
    text, plain = (as_text(explained(name)) for name in ("kv8_decode", "paged_decode"))
    assert "\n  |o - exact| <= |v_scale| sum_j P_ij (e_ij" in text
    assert " of the largest |v_scale| |v|\n" in text
    assert "\n  |o - exact| <= sum_j P_ij (e_ij" in plain
    assert "v_scale" not in plain


def test_another_device_has_other_limits() -> None:
    here, there = as_dict(explained(arch="sm_90")), as_dict(explained(arch="sm_86"))
    assert here["shared_memory"]["limit"] == 232448
    assert there["shared_memory"]["limit"] == 101376
    assert here["shared_memory"]["buffers"]["k"] == 2 * there["shared_memory"]["buffers"]["k"]


def test_a_decode_kernel_is_explained_by_a_decode_step() -> None:
    e = explained("unified_decode")
    data, text = as_dict(e), as_text(e)
    assert [(p["M"], p["N"]) for p in data["pictures"]] == [(1, 512), (8, 512)]
    assert data["roofline"]["bound"] == "memory"
    # 32 caches of 8192 keys, both halves, and rows of q and o
    assert data["roofline"]["bytes"] == 32 * 2 * (2 * 8192 * 128 + 2 * 128)
    assert "roofline at M = 1, N = 8192, 32 K/V heads in all" in text
    assert "exp2(scale * s - phi)" in text
    assert "a split with a row outside of the bounds is computed again" in text
    compressed = as_dict(explained("mla_decode"))["roofline"]
    heads = 2048 // 576 * (16384 // 8192)
    assert compressed["bytes"] == 2 * heads * (8192 * 576 + 576 + 512)  # v is part of k


def test_rows_of_pages_are_told_of_once() -> None:
    """The memory that a key takes, before the first kernel of gradients."""
    module = plans_of("paged_training").modules[0]
    first, *others = backward_text(explain_backward(module, DEVICES["sm_90"], {})).split("\n\n")
    assert (
        "before it, pages of k and v are copied to rows: 512 B of memory for each key of a K/V head" in first
    )
    assert (
        "behind the last, dk and dv of rows, 1024 B, are summed by page, in the order of the table" in first
    )
    assert not any("rows" in text and "pages" in text for text in others)
