"""State of a run, divided by how long each part lives: what was asked for, its parts, its status, and its folder."""
