"""What a prediction shows beyond time."""
