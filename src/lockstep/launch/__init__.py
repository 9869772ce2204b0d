"""Starting a run on several processes and nodes, and starting it again: each turns a Config into a command."""
