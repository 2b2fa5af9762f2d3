"""Let tests import the builders beside them and those of tests/tiny.py."""

import sys
from pathlib import Path

for place in (Path(__file__).parent, Path(__file__).parents[1]):
    sys.path.insert(0, str(place))
