"""selected_rows for cuda.sm_90a: calls the module made for it.

Made from specs/selected_rows.attn; `attnc compile specs/selected_rows.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
selected_rows = default.selected_rows
