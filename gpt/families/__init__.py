"""The models of transformers whose weights are read and written: each file of this folder with a `FAMILY` is one."""

import importlib
import pkgutil

from gpt.families.family import Family


def _found() -> dict[str, Family]:
    modules = (importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__))
    return {module.FAMILY.model_type: module.FAMILY for module in modules if hasattr(module, "FAMILY")}


FAMILIES = _found()
"""By the model_type of config.json."""
