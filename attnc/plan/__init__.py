"""How: from a variant and its schedule to kernels that a template can say aloud.

    Variant + Schedule --plan--> ir.Module --(target.render)--> text

Every decision is taken here and lands in a field of `ir`; templates hold no arithmetic. Passes, in order:
`lower` (what a target cannot do yet is a diagnostic), `Target.configs` (those that some device can run),
`softmax` (its strategies, base-2 scaling), `loads` (what is loaded where, under which name), `regions` (mask
-> loop bounds), `forward`, `decode` and `backward` (assembly), `verify` (checks the result).
No Jinja, Triton, CuPy or torch is imported here.
"""
