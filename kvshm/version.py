"""The one place that states kvshm's version."""

__version__ = "0.1.0"
