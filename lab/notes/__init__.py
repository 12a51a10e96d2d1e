"""One current note a subject; its tables are generated from recordings."""
