"""packed_training for cuda.sm_90a: calls the module made for it.

Made from specs/packed_training.attn; `attnc compile specs/packed_training.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
packed_training = default.packed_training
