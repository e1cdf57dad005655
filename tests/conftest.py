"""What every test starts from."""

import gc
import signal
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process that they start;
# some tests are about Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# how fast a busy machine is says nothing about the code; every run draws other examples
settings.register_profile("untimed", deadline=None, max_examples=50)
settings.load_profile("untimed")


gc.disable()  # a seventh of the imports' time: they make millions of objects, and hardly any garbage


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leave what all tests have imported out of every later garbage collection: it is most of the heap."""
    collected = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return collected


def pytest_unconfigure() -> None:
    """Let the interpreter free it at its end, or libraries warn of leaks."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``: whole files to a worker, so that it starts what they share once; of two folders all files to one.

    xdist has marks for this (``--dist loadgroup``), which xdist 3.8 does not see under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class SharedServiceScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.startswith(("tests/gpu/", "tests/engine/test_every_family.py")):
                return nodeid  # each has an engine of its own, and shares nothing
            return next((each for each in ("tests/service/", "tests/engine/") if file.startswith(each)), file)

    return SharedServiceScheduling(config, log)
