"""DLRM's dot interaction: pairwise products of features beside the dense vector, in one pass each way."""
