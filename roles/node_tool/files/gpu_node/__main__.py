"""Entry point of `python3 -m gpu_node`."""

import sys

from gpu_node.cli import main

sys.exit(main())
