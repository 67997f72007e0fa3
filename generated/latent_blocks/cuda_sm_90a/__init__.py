"""latent_blocks for cuda.sm_90a: calls the module made for it.

Made from specs/latent_blocks.attn; `attnc compile specs/latent_blocks.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
latent_blocks = default.latent_blocks
