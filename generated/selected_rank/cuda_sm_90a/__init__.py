"""selected_rank for cuda.sm_90a: calls the module made for it.

Made from specs/selected_rank.attn; `attnc compile specs/selected_rank.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
selected_rank = default.selected_rank
