"""How training speeds up with the number of ranks: measured, explained, extrapolated. See docs/scale.md."""
