"""Nothing is summed in the order of chance unless the plan says so: the proof, and that it can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnc.verify.subject import atomic_inputs
from tests.plans import files_of, plans_of
from tests.planted.hunting import files_with
from tests.planted.registry import BUGS, module_of
from tests.target.atomics import undeclared_atomics
from tests.verify.judging import modules_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SPECS = sorted(path.stem for path in (ROOT / "specs").glob("*.attn"))
SUMMED = """attention summed {{
  input q: bf16[B, M, H, 64]
  input k, v: bf16[B, N, H, 64]
  input slope: f32[H]
  input table: f32[H, 65]
  score = dot(q, k) / 8 + slope[h] * (kv_idx - q_pos) + table[h, clamp(q_pos - kv_idx, 0, 64)]
  normalize = softmax
  output o: bf16[B, M, H, 64]
  grad q, k, v, slope, table
}}
schedule summed for {target} {{
  tile.q = 32, tile.kv = 32, warps = 2
  backward {{ accumulate.dslope = {way}, accumulate.dtable = atomic, accumulate.dq = {way} }}
}}
"""

LISTED = """attention latent {
  input q: bf16[B, M, G, 80]
  input k: bf16[B, N, 1, 80]
  input v: bf16[B, N, 1, 64] via prefix(k)
  input idx: i32[B, M, S]
  score = dot(q, k)
  mask = listed(idx, rows = 1, keys = 1)
  normalize = softmax
  output o: bf16[B, M, G, 64]
  grad q, k
}
schedule latent for triton {
  loops = [kv], pack = gqa
  backward { accumulate.dk = atomic, tile.q = 16, tile.kv = 16 }
}
"""


@pytest.mark.one_in(8)
@pytest.mark.parametrize("spec", SPECS)
def test_two_passes_add_nothing_atomically(spec: str) -> None:
    """The first module of each attention and target."""
    modules = reversed(plans_of(spec).modules)
    first = {(module.variant.attention.name, module.target): module for module in modules}
    for module in first.values():
        assert undeclared_atomics(files_of(module), atomic_inputs(module)) == ()


@pytest.mark.parametrize("target", ["triton", "cuda.sm_80"])
def test_what_is_added_atomically_is_found(target: str) -> None:
    (module,) = modules_of(SUMMED.format(target=target, way="atomic"))
    assert atomic_inputs(module) == {"q", "slope", "table"}
    assert undeclared_atomics(files_of(module), {"q", "slope", "table"}) == ()
    for left_out in ("q", "slope", "table"):
        (pointer,) = undeclared_atomics(files_of(module), {"q", "slope", "table"} - {left_out})
        assert pointer.startswith(f"d{left_out}_")
    (module,) = modules_of(SUMMED.format(target=target, way="two_pass"))
    assert undeclared_atomics(files_of(module), {"table"}) == ()
    assert undeclared_atomics(files_of(module), ()) == ("dtable_ptr",)


@pytest.mark.parametrize("target", ["triton", "cuda"])
def test_two_passes_in_one_are_found(target: str) -> None:
    bug = BUGS[f"{target} precision: two passes in one"]
    module = module_of(bug.attention, bug.target)
    assert undeclared_atomics(files_with(bug), atomic_inputs(module)) == ("dslope_ptr",)


def test_what_is_added_outside_of_a_turn_is_found() -> None:
    """Sums of keys that queries select are added to by one query after the other."""
    (module, *_) = (
        m for m in plans_of("selected_training").modules if m.variant.attention.name == "dsa_training"
    )
    (name, text) = next(
        (name, text) for name, text in files_of(module).items() if "_await_turn(_turns_ptr" in text
    )
    assert undeclared_atomics({name: text}, ()) == ()
    wait = next(line for line in text.splitlines() if "_await_turn(_turns_ptr" in line)
    late = text.replace(f"{wait}\n", "").replace(
        "        tl.debug_barrier()\n", f"{wait}\n        tl.debug_barrier()\n"
    )
    assert undeclared_atomics({name: late}, ()) == ("_sums_ptr",)
    assert undeclared_atomics({name: text.replace(wait, "        pass")}, ()) == ("_sums_ptr",)


def test_what_is_added_to_keys_as_it_comes_is_declared() -> None:
    (module,) = modules_of(LISTED)
    assert atomic_inputs(module) == {"k"}
    assert undeclared_atomics(files_of(module), {"k"}) == ()
    assert undeclared_atomics(files_of(module), ()) == ("_sums_ptr",)
