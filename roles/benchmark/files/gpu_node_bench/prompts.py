"""What the endpoint is asked: the workloads, and texts of an exact length."""

from __future__ import annotations

import random

WORKLOADS = {
    "code": (
        "Write a B-tree in Python, thoroughly commented: a class for nodes and one for the tree, with insert, search "
        "and delete, every case of a delete included (from a leaf, from an inner node, borrowing from a sibling, "
        "merging two siblings). Then write a test harness for it that inserts and deletes thousands of random keys, "
        "checks the tree's invariants after every step, and prints a summary. Answer with the code alone."
    ),
    "prose": (
        "Write a long essay, in connected paragraphs and without headings or lists, about a lighthouse keeper's family "
        "on a northern coast through four generations: the work, the weather, the ships, what each generation hoped "
        "for, and how the coming of electricity and then of automation changed their days."
    ),
    "math": (
        "Solve this step by step and show every calculation. A tank is filled by three pipes: the first alone needs 12 "
        "hours, the second 15, the third 20. They start together, the first is shut after 2 hours, the second after 3, "
        "and the third works on until the tank is full. How long does it take in all? Then find the answer for general "
        "filling times a, b and c, check it against the numbers, and work out how it changes when the tank leaks a "
        "twentieth of its volume each hour. Verify each result by another way of calculating it."
    ),
}

# Every word once, so that a block in another order has as many tokens and shares no prefix.
_WORDS = [
    "river",
    "stone",
    "garden",
    "window",
    "letter",
    "market",
    "winter",
    "summer",
    "village",
    "teacher",
    "doctor",
    "engine",
    "bridge",
    "forest",
    "mountain",
    "island",
    "harbor",
    "kitchen",
    "library",
    "station",
    "captain",
    "farmer",
    "soldier",
    "painter",
    "singer",
    "morning",
    "evening",
    "weather",
    "journey",
    "message",
    "picture",
    "corner",
    "shadow",
    "silver",
    "copper",
    "golden",
    "yellow",
    "purple",
    "simple",
    "narrow",
    "heavy",
    "gentle",
    "broken",
    "hidden",
    "frozen",
    "distant",
    "familiar",
    "quiet",
    "early",
    "clever",
    "between",
    "without",
    "against",
    "along",
    "around",
    "before",
    "behind",
    "during",
    "under",
    "across",
    "toward",
]
BLOCK_WORDS = len(_WORDS)
_HEAD = "Read these notes and answer with one word:"
_FILLER = " a"


def text(blocks: int, fillers: int, seed: int) -> str:
    """A prompt of that many blocks of words and filler words. Another seed shares nothing but the first few words."""
    order = random.Random(seed)
    parts = [_HEAD]
    for _ in range(blocks):
        words = list(_WORDS)
        order.shuffle(words)
        parts += words
    return " ".join(parts) + _FILLER * fillers


def short(seed: int) -> str:
    """A short question that was not asked before."""
    first, second = random.Random(seed).sample(range(1000, 10000), 2)
    return f"What is {first} + {second}? Answer with the number."


def of_workload(name: str, number: int) -> str:
    """The workload's prompt as one of many concurrent clients asks it: no two of them the same."""
    return f"Request {number}. {WORKLOADS[name]}"
