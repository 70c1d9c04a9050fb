"""The one version, of the library, its command and this package; and whether the package is here once."""

import pathlib
import warnings

from . import _native

__version__: str = _native.version


def warn_of_several() -> None:
    """Wheels with and without GPU code have different names and the same files: pip lets one overwrite the other."""
    found = pathlib.Path(__file__).resolve().parents[1].glob("deep_ep*-*.dist-info")
    names = sorted(folder.name.partition("-")[0] for folder in found)
    if len(names) > 1:
        warnings.warn(
            f"deep_ep is installed more than once, as {', '.join(names)}, and they overwrite each other's files: "
            f"pip uninstall {' '.join(names)}, then install one of them",
            stacklevel=2,
        )
