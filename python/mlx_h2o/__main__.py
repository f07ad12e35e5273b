"""`python -m mlx_h2o`."""

import sys

from .cli import main

sys.exit(main())
