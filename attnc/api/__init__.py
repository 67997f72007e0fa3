"""The compiler from Python: `attnc.compile` and what it returns.

`compile` finds or makes a package on disk, `schedule` writes the schedule that a spec leaves out, `family` is
the callable, `shown` what a notebook shows. Nothing here is imported by `import attnc` itself.
"""
