"""How decode rows are cut into chunks that fit a budget of memory."""

from __future__ import annotations


def chunk_rows(rows: int, each: int, width: int, budget: int) -> list[tuple[int, int]]:
    """Return row ranges [first, last) of whole sequences whose float32 logits fit in ``budget`` bytes.

    ``rows`` is a multiple of ``each``, the rows of one sequence; ``width`` the columns of a row. A range has at least
    one sequence, so a budget smaller than a sequence's logits is exceeded by one of them.
    """
    fit = budget // (4 * width) // each * each
    step = max(each, fit)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]
