"""Speed of training by the number of ranks: measured, explained, extrapolated. See docs/scale.md."""
