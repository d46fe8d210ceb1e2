"""`python3 -m gpu_load load|pairs|allreduce`, or one of its workers."""

import sys

from gpu_load.parent import main

sys.exit(main(sys.argv[1:]))
