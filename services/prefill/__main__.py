"""`python -m services.prefill`: one prefill worker."""

import sys

from services.prefill.main import main

if __name__ == "__main__":
    sys.exit(main())
