"""Where the sums of an epilogue's gradients go; what they are is in tests/kernels/test_epilogue.py."""

from attnc.target.sm80.render import render_cuda
from tests.plan.test_epilogue import LINES
from tests.verify.judging import modules_of, spec


def test_each_sum_has_its_place() -> None:
    (module,) = modules_of(spec(LINES, "tile.q = 64, tile.kv = 64", target="cuda.sm_80"))
    text = render_cuda(module, path="a.attn", sha256="0")["default_backward_epilogue.cu"]
    text = " ".join(text.split())
    assert "args.ds_sum_ptr[blockIdx.x] = ds_sum;" in text
    assert "args.drow_ptr[(long long)(b * H + h) * args.M_padded + q_idx] = drow;" in text
    assert "args.dw_ptr[(long long)blockIdx.x * DV + d] = dw;" in text
    assert "atomic_add(&args.dhalf_ptr[(d / 2) * args.stride_dhalf_0], dhalf);" in text
    place = "((long long)(b * H + h) * args.M_padded + q_idx) * DV + first"
    assert f"store_columns(&args.dgate_ptr[{place}], dgate);" in text


def test_a_sum_of_a_column_loads_the_index_that_says_where_it_goes() -> None:
    """Behind the rows, which have loaded it for their own elements."""
    lines = ["input perm: i32[64]", *(line.replace("d // 2", "perm[perm[d]]") for line in LINES)]
    (module,) = modules_of(spec(lines, "tile.q = 64, tile.kv = 64", target="cuda.sm_80"))
    text = render_cuda(module, path="a.attn", sha256="0")["default_backward_epilogue.cu"]
    _, behind = text.split("for (int d = threadIdx.x; d < DV; d += THREADS) {")
    first, second = [line.strip() for line in behind.splitlines()[1:3]]
    assert first.startswith("const int perm_d = args.perm_ptr[d * ")
    assert second.startswith("const int perm_kv = 0 <= perm_d && perm_d < 64 ? args.perm_ptr[perm_d * ")
    assert "atomic_add(&args.dhalf_ptr[perm_kv * args.stride_dhalf_0], dhalf);" in behind
