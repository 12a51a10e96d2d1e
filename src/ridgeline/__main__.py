"""``python -m ridgeline``: the command line, where the script is not on the path."""

import sys

from ridgeline.cli import main

sys.exit(main())
