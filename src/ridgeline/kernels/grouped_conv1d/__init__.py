"""Convolutions along sequences whose channels lie last, in groups: positions of speech encoders."""
