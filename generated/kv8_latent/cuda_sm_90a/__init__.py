"""kv8_latent for cuda.sm_90a: calls the module made for it.

Made from specs/kv8_latent.attn; `attnc compile specs/kv8_latent.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
kv8_latent = default.kv8_latent
