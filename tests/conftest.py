"""What every test starts from."""

import signal

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process that they start;
# some tests are about Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
