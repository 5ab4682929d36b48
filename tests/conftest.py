"""Settings that every test shares."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
