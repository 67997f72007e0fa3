"""training_invariant for cuda.sm_90a: calls the module made for it.

Made from specs/serving_invariant.attn; `attnc compile specs/serving_invariant.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
training_invariant = default.training_invariant
