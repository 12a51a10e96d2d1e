"""Scaled dot-product attention for Hopper: warp-specialized, fed by the tensor memory accelerator."""
