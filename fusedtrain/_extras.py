"""Packages that only a part of fusedtrain needs, imported where they are used."""

import importlib
import importlib.util
from pathlib import Path


def need(module: str, extra: str):
    """Returns an optional module; ModuleNotFoundError names the pip extra where its package is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        if missing == "fusedtrain":
            raise
        raise _missing(missing, extra) from None


def require(package: str, extra: str | None) -> Path:
    """Returns a package's folder, or raises what :func:`need` does, without the seconds that importing it takes.

    ``extra``: None for a package of none.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of that name is no package
        raise _missing(package, extra)
    return Path(spec.origin).parent


def _missing(package: str, extra: str | None) -> ModuleNotFoundError:
    what = f"'fusedtrain[{extra}]'" if extra else package
    message = f"needs the package {package}, which is not installed: pip install {what}"
    return ModuleNotFoundError(message, name=package)
