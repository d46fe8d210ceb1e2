"""`python3 -m gpu_node_quality run REQUEST REPORT` or `compare FIRST SECOND`."""

import sys

from gpu_node_quality.run import main

sys.exit(main(sys.argv[1:]))
