"""Errors that speak of the guarantee rather than of Python."""


class PrivacyError(RuntimeError):
    """A privacy promise cannot be kept: the message names what breaks it and the way out."""
