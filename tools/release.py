"""Builds a release: sdist and wheel in dist/, and the tag of the version.

    python tools/release.py            # checks, builds, tags
    python tools/release.py --check    # checks alone
    python tools/release.py --build    # builds alone, also from a checkout with changes

A release is made from a clean checkout, whose changelog begins with a section of the package's version and a
date, and has nothing unreleased above it. The tag is made here and pushed by hand.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
#: A section of the changelog: `## [0.1.0] - 2026-11-24`.
_SECTION = re.compile(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)
#: More bullets than this are a log, and not what a user reads before upgrading.
MOST_BULLETS = 40


def find_problems(version: str, changelog: str, changed: str, tags: list[str]) -> list[str]:
    """Returns what keeps this version from being released.

    changelog: its text; changed: what `git status --porcelain` prints; tags: those that exist.
    """
    problems = []
    sections = list(_SECTION.finditer(changelog))
    first = sections[0] if sections else None
    if first is None or first[1] != version:
        problems.append(f"CHANGELOG.md begins with [{first[1] if first else ''}], the package is {version}")
    elif first[2] is None:
        problems.append(f"CHANGELOG.md gives no date for [{version}]: write '## [{version}] - YYYY-MM-DD'")
    else:
        end = sections[1].start() if len(sections) > 1 else len(changelog)
        bullets = len(re.findall(r"^- ", changelog[first.end() : end], re.MULTILINE))
        if not 0 < bullets <= MOST_BULLETS:
            problems.append(
                f"CHANGELOG.md has {bullets} bullets for [{version}]: 1 to {MOST_BULLETS} are read"
            )
    if changed:
        problems.append(f"the checkout has changes:\n{changed.rstrip()}")
    if f"v{version}" in tags:
        problems.append(f"the tag v{version} exists: raise the version in attnc/version.py")
    return problems


def build() -> list[Path]:
    """Builds an sdist, and a wheel from the sdist, into dist/, and returns both."""
    shutil.rmtree(DIST, ignore_errors=True)
    program = "import setuptools.build_meta as backend; backend.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = DIST.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(DIST))
    subprocess.run([*pip, str(sdist)], check=True)
    (wheel,) = DIST.glob("*.whl")
    return [sdist, wheel]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="say what keeps the version from being released")
    only.add_argument("--build", action="store_true", help="build, and neither check nor tag")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from attnc.version import __version__

    if not given.build:
        changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        problems = find_problems(__version__, changelog, _git("status", "--porcelain"), _git("tag").split())
        if problems:
            sys.exit("not released:\n" + "\n".join(f"- {problem}" for problem in problems))
    if given.check:
        return
    for path in build():
        print(path.relative_to(ROOT))
    if not given.build:
        _git("tag", "--annotate", f"v{__version__}", "--message", f"attnc {__version__}")
        print(f"tagged v{__version__}: git push origin v{__version__}")


def _git(*arguments: str) -> str:
    done = subprocess.run(("git", "-C", str(ROOT), *arguments), check=True, capture_output=True, text=True)
    return done.stdout


if __name__ == "__main__":
    main()
