"""Record what a training script computes."""
