"""DCNv2's cross layer: the products around its matrix product fused in, forward and backward."""
