"""Traces: one columnar table of spans for predicted and measured runs, and the files they are written to."""

from ridgeline.trace.chrome import write_chrome
from ridgeline.trace.table import Trace, TraceBuilder

__all__ = ["Trace", "TraceBuilder", "write_chrome"]
