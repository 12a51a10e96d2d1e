"""Training data: token files, text shards, and batches of packed documents."""
