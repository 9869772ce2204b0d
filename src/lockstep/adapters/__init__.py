"""Code that other trainers run, as tasks of lockstep."""
