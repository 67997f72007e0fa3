"""Mutants of generated kernels: how much `attnc verify` sees, as a number.

A mutant is a kernel with one small change: a comparison, a bound, a constant, an index, a stride, a statement
that is dropped, a condition, a type, one lane of many. `operators` holds the kinds of changes, over syntax
trees of tree-sitter, the same for Triton and CUDA C++. `sample` draws from all of them, and `judge` runs
`attnc verify` with its default budget on each.

    python -m tools.mutants --count 200 --out mutants.json
    python -m tools.mutants --count 3000 --seed 7 --target cuda.sm_90a --out mutants.json

With a GPU the mutants run there, compiled by as many processes as there are processors; elsewhere Triton's
interpreter and the simulators of CUDA kernels run them. A mutant is *killed* where a case is judged wrong,
where it hangs, faults or dies; what no compiler takes is *invalid*; the rest *survived*. A survivor is either
equal to the kernel in every run, or something that verification does not see.

Mutation analysis as such: DeMillo, Lipton, Sayward, "Hints on Test Data Selection", IEEE Computer, 1978.
"""
