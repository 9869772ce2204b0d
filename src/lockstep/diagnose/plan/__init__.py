"""Estimate a training's memory and time per rank, without its devices: `lockstep plan`."""
