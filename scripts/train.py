#!/usr/bin/env python
"""Train from a recipe: python scripts/train.py +recipe=quickstart. (Hydra's shell completion looks for this word: @hydra.main)"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

from framework.cli.train import main

if __name__ == "__main__":
    main()
