"""fewstep: turn an autoregressive checkpoint into a few-step diffusion language model.

The rooms of the repository (distill/, teachers/, students/, kernels/, eval/, serve/) are
subpackages of this one. A wheel places them here; in a source tree they stand at the repository's
root, which this file then adds to the package's search path.
"""

from pathlib import Path

__version__ = "0.1.0"

_root = Path(__file__).resolve().parents[2]
if (_root / "pyproject.toml").is_file() and (_root / "students").is_dir():
    __path__.append(str(_root))
