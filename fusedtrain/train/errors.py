"""The error for what a training run cannot be told."""


class InputError(Exception):
    """The user's options, data or model do not fit together; the message is one line and says what to change."""


def require(condition: bool, message: str) -> None:
    """Raises InputError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise InputError(message)
