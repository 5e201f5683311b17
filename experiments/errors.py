"""The one error of a run that is the user's to mend."""


class ConfigError(ValueError):
    """A setting cannot be used; the message is one line that names it, gives its value and says what to do."""
