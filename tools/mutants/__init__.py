"""Mutants of generated kernels: how much `attnc verify` sees, as a number.

A mutant is a kernel with one small change: a comparison, a bound, a constant, an index, a stride, a statement
that is dropped, a condition, a type, one lane of many. `operators` holds the kinds of changes, over syntax
trees of tree-sitter, the same for Triton and CUDA C++. `sample` draws from all of them, `judge` runs `attnc
verify` with its default budget on each, and `heavy` looks again at what survived.

    python -m tools.mutants --count 200
    python -m tools.mutants --count 3000 --seed 7 --together 8 --seconds 300 --heavy --out mutants.jsonl

With a GPU the mutants run there, compiled by as many processes as there are processors; elsewhere Triton's
interpreter and the simulators of CUDA kernels run them. The same command goes on with a file of results.
`scores` counts them. A mutant is *killed* where a case is judged wrong, where it hangs, faults or dies. What
no compiler takes is *invalid*. A mutant is *equivalent* if compilers make the original's machine code of it,
or its results have the original's bits in every run; *rounding* if they differ within the bound of every
element. What is left is a *survivor*: wrong in a way that verification does not see.

Mutation analysis as such: DeMillo, Lipton, Sayward, "Hints on Test Data Selection", IEEE Computer, 1978.
"""
