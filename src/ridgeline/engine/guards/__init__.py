"""Guards: whether anything a captured call depends on has changed."""
