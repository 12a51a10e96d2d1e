"""Traces: one columnar table of spans for predicted, simulated and measured runs; files in and out; analyses."""

from ridgeline.trace.archive import load, save
from ridgeline.trace.breakdown import totals
from ridgeline.trace.chrome import write_chrome
from ridgeline.trace.kind import WORK, Kind
from ridgeline.trace.read import read, read_job, read_ranks
from ridgeline.trace.steps import steps
from ridgeline.trace.table import Counter, Trace, TraceBuilder, concat, from_columns

__all__ = [
    "WORK",
    "Counter",
    "Kind",
    "Trace",
    "TraceBuilder",
    "concat",
    "from_columns",
    "load",
    "read",
    "read_job",
    "read_ranks",
    "save",
    "steps",
    "totals",
    "write_chrome",
]
