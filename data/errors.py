"""The one error that `data/` raises for what a user can cause."""


class DataError(ValueError):
    """Data that can't be used: one line for a person, naming the file and, where there is one, the line or row."""
