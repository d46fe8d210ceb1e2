"""`python3 -m gpu_node_image`."""

import sys

from gpu_node_image.cli import main

sys.exit(main(sys.argv[1:]))
