"""latent_types for cuda.sm_90a: calls the module made for it.

Made from specs/latent_types.attn; `attnc compile specs/latent_types.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
latent_types = default.latent_types
