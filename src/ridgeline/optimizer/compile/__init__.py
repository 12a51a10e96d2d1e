"""Around torch.compile: repeated pieces, labels, deadlines."""
