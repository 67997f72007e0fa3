"""selected_types for cuda.sm_90a: calls the module made for it.

Made from specs/selected_types.attn; `attnc compile specs/selected_types.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
selected_types = default.selected_types
