"""selected_prompts for cuda.sm_90a: calls the module made for it.

Made from specs/selected_prompts.attn; `attnc compile specs/selected_prompts.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
selected_prompts = default.selected_prompts
