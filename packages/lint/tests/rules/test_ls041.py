"""LS041: weights of one rank."""
