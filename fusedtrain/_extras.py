"""Packages that only a part of fusedtrain needs, imported where they are used."""

import importlib
import importlib.util


def need(module: str, extra: str):
    """Returns an optional module; ModuleNotFoundError names the pip extra where its package is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        if missing == "fusedtrain":
            raise
        raise _missing(missing, extra) from None


def require(package: str, extra: str | None) -> None:
    """Raises what :func:`need` does where a package is missing, without the seconds that importing it takes.

    ``extra``: None for a package of none.
    """
    if importlib.util.find_spec(package) is None:
        raise _missing(package, extra)


def _missing(package: str, extra: str | None) -> ModuleNotFoundError:
    what = f"'fusedtrain[{extra}]'" if extra else package
    message = f"needs the package {package}, which is not installed: pip install {what}"
    return ModuleNotFoundError(message, name=package)
