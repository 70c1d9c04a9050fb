"""The one version: the library's, behind the version of the interface that it stands in for, as pip shows it."""

from . import _native

__version__ = f"1.2.1+native.{_native.version}"
