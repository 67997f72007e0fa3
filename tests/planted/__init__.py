"""Bugs that real attention kernels have had, planted in generated text: verification must see every one.

`bug` says what one is and plants it, the modules named after a target and a phase list them, `registry`
collects them, `hunting` runs verification on a kernel that has one, and `cases.json` keeps for each a small
case that shows it.
"""
