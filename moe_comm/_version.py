"""The package's version; setup reads it without importing the package."""

__version__ = "0.2.0"
