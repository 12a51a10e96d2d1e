"""Faster models with proof: named rewrites, kernel choice, lowering, verification and receipts."""
