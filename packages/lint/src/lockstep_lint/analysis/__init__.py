"""Analyse names, values, guards, loops and calls of the checked files, for the rules."""
