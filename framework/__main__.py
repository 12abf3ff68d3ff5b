"""`python -m framework ...`: the command `framework`, also where its script is not on PATH."""

import sys

from framework.cli.main import main

sys.exit(main())
