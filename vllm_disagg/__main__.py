"""Run the command `vllm-disagg` as `python -m vllm_disagg`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
