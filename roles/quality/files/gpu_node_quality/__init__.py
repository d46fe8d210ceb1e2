"""Quality gates: does the model still answer as well, and as before? Standard library only."""
