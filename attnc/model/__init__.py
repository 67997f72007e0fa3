"""What a spec means, free of targets and tiles.

    ast.File --resolve--> Program --variants--> Variant

`tensors`, `attention` and `schedule` are the nouns; `resolve` looks every name up and infers every role and
type; `rules` is a tuple of checks over a resolved program; `variants` enumerates the params. Nothing here
imports plan, target or any tensor library.
"""
