"""Where `python -m examples.smollm2` begins: gRPC reads how it shall wait when it is imported."""

import sys

from attnd.v1.polling import poll_in_waiting_threads

if __name__ == "__main__":
    poll_in_waiting_threads()
    from .command import main

    sys.exit(main())
