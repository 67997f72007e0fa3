"""The compiler from Python: `attnc.compile` and what it returns.

`compile` finds or makes a package on disk, `family` is the callable, `hopper` says which calls Hopper's own
kernels take as they are. Nothing here is imported by `import attnc` itself.
"""
