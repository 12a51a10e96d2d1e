"""Cross-entropy of logits and class indices."""
