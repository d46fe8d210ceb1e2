"""What can go wrong, told apart by what it means for the report."""


class BenchError(Exception):
    """The run cannot begin or its file cannot be used: one line for the person who called."""


class NoFigureError(Exception):
    """This measurement gives no number, and why."""


class DisturbedError(NoFigureError):
    """Something else was in it (another's request, a pause): worth another try."""
