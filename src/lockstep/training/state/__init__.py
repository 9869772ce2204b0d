"""State of a run by lifetime: what was asked for, its parts, its status, and its folder."""
