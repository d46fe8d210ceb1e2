"""Prove a serving node: its cards, its engines, their answers and their limits. Standard library only."""
