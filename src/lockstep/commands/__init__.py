"""Parse the flags of each command before torch is imported, so that a wrong flag fails at once."""
