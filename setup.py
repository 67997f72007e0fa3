"""Lists the packages of the wheel; everything else is in pyproject.toml.

`pyproject.toml` can either search for packages or name them, and the wheel needs both: those found under
`attnc/`, and the top-level `grammar/` and `templates/`, carried as `attnc.grammar` and `attnc.templates`.
"""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["attnc", "attnc.*"]), "attnc.grammar", "attnc.templates"])
