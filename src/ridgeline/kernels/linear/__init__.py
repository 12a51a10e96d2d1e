"""A few rows times a large weight, with what comes before and after it."""
