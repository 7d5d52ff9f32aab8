"""`python -m broadsight` is the `broadsight` command."""

import sys

from .cli import main

sys.exit(main())
