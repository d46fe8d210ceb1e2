"""`python3 -m gpu_node_kernels`."""

import sys

from gpu_node_kernels.cli import main

sys.exit(main(sys.argv[1:]))
