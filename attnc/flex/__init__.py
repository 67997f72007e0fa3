"""FlexAttention's programs on attnc's kernels.

    from attnc.flex import flex_attention            # instead of torch.nn.attention.flex_attention
    o = flex_attention(q, k, v, score_mod=alibi, mask_mod=causal)

`flex_attention` calls a kernel of the mods, `family_of` gives it to be read, `to_spec` prints the spec that
they mean. `trace` calls the mods with symbols (`symbols`, `operations`, `functions`) and notes what they do
and what captured integers are (`tape`); `spec` says the same in the language, `programs` keeps the kernels
and chooses whose they are. `blocks` makes the lists of a BlockMask part of the mask, `dense` computes what
mods give for all pairs, `places` finds the user's line for an error of a spec. Under torch.compile a call is
the operator of `compiled`, where mods are recorded in a way that torch can follow (`recording`), and replayed
with symbols.
"""

from attnc.flex.attention import family_of, flex_attention
from attnc.flex.conversion import to_spec
from attnc.flex.errors import FlexError

__all__ = ["FlexError", "family_of", "flex_attention", "to_spec"]
