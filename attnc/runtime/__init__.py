"""Generated text at run time: importing it (`loader`), compiling it with no GPU (`toolchains`),
timing it (`timing`).

Only this package, `verify`, `reference` and `bench` know of torch or triton. A generated module needs none of
it.
"""
