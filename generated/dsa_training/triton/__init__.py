"""dsa_training for triton: calls the module made for it.

Made from specs/selected_training.attn; `attnc compile specs/selected_training.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
dsa_training = default.dsa_training
