"""Load for GPUs, in the serving image: it needs torch and nothing else. Prints a line of JSON for each finding."""
