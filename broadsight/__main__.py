"""`python -m broadsight` is the `broadsight` command."""

import sys

from .cli.main import main

sys.exit(main())
