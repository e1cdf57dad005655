"""What every test starts from."""

import signal

from hypothesis import settings

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process that they start;
# some tests are about Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("untimed", deadline=None)  # how fast a busy machine is says nothing about the code
settings.load_profile("untimed")
