"""``python -m ridgeline``: the command line, where the script is not on the path."""

from ridgeline.cli import main

main()
