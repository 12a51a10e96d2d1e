"""The search: candidates in stages, timed, judged, accepted or rejected."""
