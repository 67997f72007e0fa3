"""Lists the packages of the wheel and notes the commit in it; everything else is in pyproject.toml.

`pyproject.toml` can either search for packages or name them, and the wheel needs both: those found under
`attnc/`, and the top-level `grammar/`, `templates/` and `specs/`, carried as `attnc.grammar` and so on.
"""

import runpy
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
CARRIED = ("attnc.grammar", "attnc.specs", "attnc.templates")


def note_commit(package: Path) -> None:
    """Writes the commit to `COMMIT` in this copy of the package, where it is known."""
    commit = runpy.run_path(str(ROOT / "attnc" / "version.py"))["find_commit"]()
    if commit is not None:
        (package / "COMMIT").write_text(f"{commit}\n")


class BuildPackage(build_py):
    """Copies the package for a wheel, with its commit."""

    def run(self):
        super().run()
        if not self.editable_mode:
            note_commit(Path(self.build_lib, "attnc"))


class Sdist(sdist):
    """Copies the checkout, with its commit."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        note_commit(Path(base_dir, "attnc"))


setup(
    packages=[*find_packages(include=["attnc", "attnc.*"]), *CARRIED],
    cmdclass={"build_py": BuildPackage, "sdist": Sdist},
)
