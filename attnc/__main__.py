"""`python -m attnc` is `attnc`."""

import sys

from attnc.cli import main

sys.exit(main())
