"""Undocumented names of vLLM, Ray and transformers that this package uses, and the check of their releases.

``tests/unit/compat/names.txt`` describes these names. With another release they may be gone, or mean something else.
"""

import os
from importlib.metadata import PackageNotFoundError, version


class UnsupportedRelease(ImportError):
    """Another release of a library is installed than the one that this package was written for."""


def require_release(distributions: tuple[str, ...], release: str) -> None:
    """Raise UnsupportedRelease unless the first installed of ``distributions`` is of ``release``, such as ``0.32``.

    The environment variable ``ROLLOUT_SERVICE_ANY_RELEASE`` disables the check, for tests against newer releases.
    """
    if os.environ.get("ROLLOUT_SERVICE_ANY_RELEASE"):  # noqa: TID251 - read where no configuration is known
        return
    for distribution in distributions:
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        if found.split(".")[:2] != release.split("."):
            raise UnsupportedRelease(
                f"{distribution} {found} is installed, but this release of rollout-service was written for "
                f"{distribution} {release}: install the version that requirements/ names"
            )
        return
