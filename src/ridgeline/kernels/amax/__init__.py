"""The largest or smallest elements along a dim that is not the last, or their places."""
