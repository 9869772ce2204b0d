"""Memory and time of a training per rank, without its devices: `lockstep plan` (docs/plan.md)."""
