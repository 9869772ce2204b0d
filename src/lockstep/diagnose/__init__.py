"""Proofs and measurements of training, built on the public parts of lockstep alone."""
