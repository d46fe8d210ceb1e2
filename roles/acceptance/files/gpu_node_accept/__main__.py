"""`python3 -m gpu_node_accept REQUEST REPORT`."""

import sys

from gpu_node_accept.run import main

sys.exit(main(sys.argv[1:]))
