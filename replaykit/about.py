"""This release's version, read by the build as well."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
"""As on PyPI. Without an annotation: hatchling looks for this line with a pattern."""
