"""`python -m services.router`: one router."""

import sys

from services.router.main import main

if __name__ == "__main__":
    sys.exit(main())
