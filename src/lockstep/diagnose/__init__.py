"""Know before paying, know why after: what a run will cost, what it waits for, how it scales."""
