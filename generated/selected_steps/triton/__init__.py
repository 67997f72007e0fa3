"""selected_steps for triton: calls the module made for it.

Made from specs/selected_steps.attn; `attnc compile specs/selected_steps.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
selected_steps = default.selected_steps
