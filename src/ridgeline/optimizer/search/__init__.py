"""The search of ``optimize``: stages propose candidates, which are built, timed, proved and accepted or rejected."""
