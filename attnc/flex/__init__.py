"""FlexAttention's programs on attnc's kernels.

    from attnc.flex import flex_attention            # instead of torch.nn.attention.flex_attention
    o = flex_attention(q, k, v, score_mod=alibi, mask_mod=causal)

`flex_attention` calls a kernel of the mods, `family_of` gives it to be read, `to_spec` prints the spec that
they mean. `trace` calls the mods with symbols (`symbols`, `operations`, `functions`) and notes what they do
and what captured integers are (`tape`); `spec` says the same in the language, `programs` keeps the kernels
and chooses whose they are. `blocks` makes the lists of a BlockMask part of the mask, `dense` computes what
mods give for all pairs, `places` finds the user's line for an error of a spec. Under torch.compile a call is
the operator of `compiled`, where mods are recorded in a way that torch can follow (`recording`), and replayed
with symbols. Other names of torch's module (`create_block_mask`, `BlockMask`, `and_masks`, ...) are torch's.
"""

from typing import Any

from attnc.flex.attention import family_of, flex_attention
from attnc.flex.conversion import to_spec
from attnc.flex.errors import FlexError

__all__ = ["FlexError", "family_of", "flex_attention", "to_spec"]


def __getattr__(name: str) -> Any:
    """Returns the attribute of torch's module that has this name, so that a program only changes its
    import: private ones too, as programs annotate mods by `_mask_mod_signature`.
    """
    if not name.startswith("__"):
        from torch.nn.attention import flex_attention as torchs

        if name in torchs.__all__ or (name.startswith("_") and hasattr(torchs, name)):
            return getattr(torchs, name)
    raise AttributeError(f"module 'attnc.flex' has no attribute {name!r}")
