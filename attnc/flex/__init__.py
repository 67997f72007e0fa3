"""FlexAttention's programs on attnc's kernels.

    from attnc.flex import flex_attention            # instead of torch.nn.attention.flex_attention
    o = flex_attention(q, k, v, score_mod=alibi, mask_mod=causal)

`flex_attention` calls a kernel of the mods, `family_of` gives it to be read, `to_spec` prints the spec that
they mean. `trace` calls the mods with symbols (`symbols`, `operations`) and notes what they do (`tape`);
`expressions` and `spec` say the same in the language, `programs` keeps the kernels, `targets` chooses whose;
`facts` looks at captured integers, `block_mask` and `options` read what torch's function takes. Under
torch.compile a call is the operator of `compiled`: `recorder` notes what mods do where torch can follow, and
`replay` does it again with symbols.
"""

from attnc.flex.attention import family_of, flex_attention
from attnc.flex.errors import FlexError
from attnc.flex.text import to_spec

__all__ = ["FlexError", "family_of", "flex_attention", "to_spec"]
