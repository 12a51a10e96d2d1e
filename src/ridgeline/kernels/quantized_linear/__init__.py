"""A few rows times a large weight of eight or four bits, with what comes before and after it."""
