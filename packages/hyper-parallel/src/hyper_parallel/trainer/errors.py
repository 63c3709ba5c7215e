"""The one kind of error that the command tells in a line instead of a traceback."""


class UsageError(ValueError):
    """Something that the user gave cannot work; the text says what was given, what was expected, and what to change."""
