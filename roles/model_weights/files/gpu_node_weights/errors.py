"""The one error that an operator reads."""


class WeightsError(Exception):
    """One line that names the thing, the value, the limit and the remedy."""
