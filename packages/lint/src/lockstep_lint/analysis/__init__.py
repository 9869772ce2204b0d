"""What the rules ask: names, values, guards, loops and calls of the files that are checked."""
