"""Parse the flags of each command before torch is imported."""
