"""`python3 -m gpu_node_bench`."""

import sys

from gpu_node_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
