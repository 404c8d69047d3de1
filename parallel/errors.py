"""What a user can put right: raised with one line that names the setting, both numbers and the remedy."""


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work. The program ends with the line and exit code 2."""
