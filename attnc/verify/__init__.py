"""Is a generated kernel right? Reference, error bound, inputs and properties.

`tolerance` evaluates the bound that a plan promises and compares with it; `strategies` draws cases,
`check` runs a module on one, `search` looks for one that it gets wrong; `interpreter` lets all this run
without a GPU. Only this package, `runtime` and `reference` know of torch or triton.
"""
