"""The recurrence of selective state spaces."""
