"""What each command's flags are, read before torch is loaded: a wrong flag is answered at once."""
