"""Makes models faster and proves it: named rewrites, kernels in their place, a torch.compile backend, search and receipts."""
