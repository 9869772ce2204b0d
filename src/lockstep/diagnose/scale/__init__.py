"""Speed of training by the number of ranks: measured and explained. See docs/scale.md."""
