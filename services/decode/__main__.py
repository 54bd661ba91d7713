"""`python -m services.decode`: one decode worker."""

import sys

from services.decode.main import main

if __name__ == "__main__":
    sys.exit(main())
