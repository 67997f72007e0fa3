"""latent_packed for cuda.sm_90a: calls the module made for it.

Made from specs/latent_invariant.attn; `attnc compile specs/latent_invariant.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
latent_packed = default.latent_packed
