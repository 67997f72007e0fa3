"""Names that the functions of generated modules have or read, which no input may be called.

Apart from `names` and without imports: whoever only calls kernels that are there asks for them too.
"""

#: What the function beside the modules reads, which takes their inputs too.
READ = frozenset(("CALL", "isinstance", "iter", "list", "next", "options", "ValueError", "VARIANTS"))
#: Parameters and tensors of a function with gradients, of one whose outer loop runs over keys, of one that
#: decodes, and of one whose blocks take tiles from a counter.
WITH_GRADIENTS = frozenset((
    "backward_config", "delta", "dk", "dlse", "do", "dq", "dq_sum", "dv", "lse2",
))  # fmt: skip
KEYS_FIRST = frozenset(("acc", "l", "m"))
DECODING = frozenset(("fallbacks", "lse_splits", "splits"))
TAKING_TILES = frozenset(("counter",))
#: What some schedule has, so that no input is called so where any may follow.
INTERFACE = READ | WITH_GRADIENTS | KEYS_FIRST | DECODING | TAKING_TILES | {"schedule"}
