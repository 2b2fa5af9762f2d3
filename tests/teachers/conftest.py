"""Let tests import the shared builders of tests/tiny.py and the server of served.py."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
