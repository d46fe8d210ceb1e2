"""`python3 -m gpu_node_weights`."""

import sys

from gpu_node_weights.cli import main

sys.exit(main(sys.argv[1:]))
