"""dsa_paged_training for triton: calls the module made for it.

Made from specs/paged_training.attn; `attnc compile specs/paged_training.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
dsa_paged_training = default.dsa_paged_training
