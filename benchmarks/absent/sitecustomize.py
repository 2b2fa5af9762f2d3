"""With this folder first on PYTHONPATH, Python finds none of the packages that a bare GPU image lacks.

They are neither importable nor listed among the installed ones, as `find_spec` and `importlib.metadata` see it.
ABSENT names others in their place, separated by spaces.
"""

import os
from importlib.machinery import PathFinder
from importlib.metadata import MetadataPathFinder

ABSENT = set(os.environ.get("ABSENT", "deepspeed datasets wandb reasoning_gym gguf jsonschema").split())
_find_spec, _find_distributions = PathFinder.find_spec, MetadataPathFinder.find_distributions


def find_spec(fullname, path=None, target=None):
    return None if fullname.partition(".")[0] in ABSENT else _find_spec(fullname, path, target)


def find_distributions(*context):
    name = context[0].name if context else None
    return [] if name and name.replace("-", "_") in ABSENT else _find_distributions(*context)


PathFinder.find_spec = staticmethod(find_spec)
MetadataPathFinder.find_distributions = staticmethod(find_distributions)
