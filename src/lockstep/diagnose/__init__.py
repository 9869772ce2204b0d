"""Diagnose runs: their cost beforehand, their waits and their scaling."""
