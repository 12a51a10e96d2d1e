"""``python -m ridgeline.cli``, where no command was installed: a GPU host with a copy of the sources."""

from ridgeline.cli import main

if __name__ == "__main__":
    main()
