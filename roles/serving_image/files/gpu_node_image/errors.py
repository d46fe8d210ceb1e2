"""The one error that an operator reads."""


class ImageError(Exception):
    """One line that names the thing, the value, the limit and the remedy."""
