"""What becomes of o, as text."""

from __future__ import annotations

from tests.target.texts import text_of


def test_lse_that_a_backward_alone_reads_is_stored_if_it_is_asked_for() -> None:
    assert text_of("gated").finish.if_wants_lse == "args.lse_ptr != nullptr && "
    assert text_of("causal_gqa", "bf16_d128").finish.if_wants_lse == ""  # an output


def test_o_is_kept_before_an_epilogue_whose_gradients_read_it() -> None:
    assert text_of("gated").finish.keeps_attention
    assert not text_of("causal_gqa", "bf16_d128").finish.keeps_attention
