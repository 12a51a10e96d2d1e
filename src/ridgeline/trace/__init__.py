"""Traces: one columnar table of spans for predicted and measured runs, and the files they are written to."""

from ridgeline.trace.chrome import write_chrome
from ridgeline.trace.kind import WORK, Kind
from ridgeline.trace.table import Counter, Trace, TraceBuilder, concat, from_columns

__all__ = ["WORK", "Counter", "Kind", "Trace", "TraceBuilder", "concat", "from_columns", "write_chrome"]
