"""The dashboard: a local web application that reads a store and writes nothing."""
