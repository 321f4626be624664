"""`python -m benchmarks.crash`."""

import sys

from benchmarks.crash.matrix import main

if __name__ == "__main__":
    sys.exit(main())
