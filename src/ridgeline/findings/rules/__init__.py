"""Rules by subject: each module registers its own."""
