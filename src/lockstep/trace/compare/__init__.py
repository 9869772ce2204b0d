"""Comparison of two recorded trainings."""
