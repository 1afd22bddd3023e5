"""Packages that only a part of fusedtrain needs, imported where they are used."""

import importlib


def need(module: str, extra: str):
    """Returns an optional module; ModuleNotFoundError names the pip extra where its package is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        if missing == "fusedtrain":
            raise
        raise ModuleNotFoundError(
            f"needs the package {missing}, which is not installed: pip install 'fusedtrain[{extra}]'", name=missing
        ) from None
