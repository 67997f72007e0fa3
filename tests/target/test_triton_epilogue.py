"""Where the sums of an epilogue's gradients go; what they are is in tests/kernels/test_epilogue.py."""

from attnc.target.triton.render import render_triton
from tests.plan.test_epilogue import LINES
from tests.verify.judging import modules_of, spec


def test_each_sum_has_its_place() -> None:
    (module,) = modules_of(spec(LINES, "tile.q = 64, tile.kv = 64", target="triton"))
    text = render_triton(module, path="a.attn", sha256="0")["default.py"]
    text = " ".join(text.split())
    assert "ds_sum_ptr + (b * H + h).to(tl.int64) * q_tiles + q_lo // BLOCK_M" in text
    assert "drow_ptr + (b * H + h).to(tl.int64) * M_padded + q_idx" in text
    assert "dw_ptr + ((b * H + h).to(tl.int64) * q_tiles + q_lo // BLOCK_M) * 64 + d" in text
    assert "dhalf_ptr + (d // 2).to(tl.int64) * stride_dhalf_0" in text
    assert "dgate_ptr + ((b * H + h).to(tl.int64) * M_padded + q_idx)[:, None] * 64 + d[None, :]" in text
