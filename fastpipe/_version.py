"""The version, in the one place that the package, its metadata and the build read."""

__version__ = "0.1.0"
