"""The `attnc` command. Each group of subcommands has its file here; `main` is the only thing to call from
outside.

Exit codes: 0 fine, 1 findings (a wrong spec, a stale file, a failed check), 2 wrong usage, 3 a bug of
attnc's, 130 interrupted. A user's mistake never shows a traceback; a bug says so, and how to report it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default the process's, and returns its exit code."""
    # The reference multiplies small matrices by the thousand; a thread pool costs each more than its work.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from attnc.cli.app import run_guarded

    return run_guarded(argv)
