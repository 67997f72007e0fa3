"""Compares the machine code of generated CUDA kernels with that of a git revision, without a GPU.

    python -m tools.same_code HEAD                  # modules whose text has changed
    python -m tools.same_code HEAD causal_gqa       # those whose path has this in it
    python -m tools.same_code HEAD --arch sm_80

Names of kernels, variables and constants are no part of it. Where code differs, registers and spilled bytes
of both are printed. What has been compiled is kept in the cache: a second run compiles what has changed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from attnc.cli.carry import export_revision
from attnc.cli.console import Mistake
from attnc.verify.carry import Comparison, compare_modules, list_cuda_modules
from attnc.verify.record import hash_of


def describe(found: Comparison) -> str:
    """Returns lines about a module that is not the same."""
    lines = [f"{found.module}: {found.because}"]
    for pair in found.pairs:
        if pair.differs:
            registers, spills = ("{} -> {}".format(*both) for both in (pair.registers, pair.spills))
            lines.append(f"    {pair.kernel} {pair.options}: registers {registers}, spills {spills}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Prints what differs; returns 1 if anything does."""
    parser = argparse.ArgumentParser(description="Compares machine code with that of a revision.")
    parser.add_argument("revision")
    parser.add_argument("parts", nargs="*", help="of paths below generated/")
    parser.add_argument("--arch", default="sm_90")
    options = parser.parse_args(arguments)
    after, different, compared = Path("generated"), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            before = export_revision(options.revision, Path(folder), "generated")
        except Mistake as mistake:
            sys.exit(f"{mistake.message}; {mistake.hint}")
        for name in list_cuda_modules(after):
            if options.parts and not any(part in name for part in options.parts):
                continue
            if (before / name).is_file() and hash_of(before / name) == hash_of(after / name):
                continue
            found = compare_modules(name, before, after, options.arch)
            compared += len(found.pairs)
            if found.because:
                different += 1
                print(describe(found), flush=True)
    print(f"{compared} kernels compared; {different} modules differ")
    return int(different > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
