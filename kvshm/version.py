"""The one place that states kvshm's version."""

__version__ = "0.1.0"
"""Version of the package; its changes are in CHANGELOG.md."""
