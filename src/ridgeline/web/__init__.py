"""Reports for a browser: one self-contained file that asks nothing of the network."""

from ridgeline.web.report import render_report, write_report

__all__ = ["render_report", "write_report"]
