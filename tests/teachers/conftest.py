"""Let tests import the shared builders of tests/tiny.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
