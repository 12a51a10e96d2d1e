"""Decoding with multi-head latent attention: every head reads the same compressed keys, which are its values too."""
