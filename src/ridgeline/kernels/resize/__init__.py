"""Images made larger or smaller by lines between their pixels."""
