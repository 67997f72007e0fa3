"""Modules with the functions of other attention libraries, for programs that call those.

    from attnc.compat.flash_attn import flash_attn_func     # for: from flash_attn import flash_attn_func

What a call asks for (which of its arguments, never their values) is written as a spec and compiled once.
Window sizes, scales and lengths are read at run time, so a new value compiles nothing. What no kernel can do
is refused, with an error that names the argument. `run_on` chooses whose kernels calls run on.
"""

from attnc.api.fastest import run_on

__all__ = ["run_on"]
