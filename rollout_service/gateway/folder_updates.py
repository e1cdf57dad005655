"""What the surfaces share whose trainers put a version into a folder and tell the service its path.

The reply to such a call means: the weights in this folder are what every live replica serves, and nothing reads the
folder any more. The trainer may then delete it. Sources: prime-rl 559b447 ``utils/client.py``, slime 624b824
``sglang_engine.py``, AReaL cbff54d ``remote_inf_engine.py``.
"""

import asyncio
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rollout_service.errors import CommitTimeout, DeploymentFailed, InvalidRequest, NotReady, RolloutServiceError
from rollout_service.gateway.dependencies import Services
from rollout_service.protocol.base import is_label
from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.upload import CommitUpload
from rollout_service.protocol.weights import WeightStatus

UPDATE_S = 600.0
"""Longest wait for a version. prime-rl reads a reply for 720 s, and then sends the call again."""
FolderPath = Annotated[str, Field(min_length=1, max_length=4096)]
_NUMBERED = re.compile(r"(?:.*_)?step_(\d{1,15})|weight(?:_update)?_v(\d{1,15})")


def number_of(folder: str) -> int | None:
    """What a trainer calls the version in a folder, by the folder's name; None: that tells no number.

    ``step_7`` (prime-rl), ``weight_v000007`` (slime), ``weight_update_v7`` (AReaL).
    """
    found = _NUMBERED.fullmatch(Path(folder).name)
    return None if found is None else int(found[1] or found[2])


async def update_from_folder(
    services: Services,
    folder: str,
    *,
    number: int | None = None,
    label: str | None = None,
    mode: PauseMode = "keep",
    timeout_s: float = UPDATE_S,
) -> WeightStatus:
    """Make what lies in ``folder`` the next version, and return once every live replica serves it.

    Told again, the same folder with the same files joins what is under way, or is answered at once when it is the
    newest version: ``Uploads.begin_folder`` says how that is known, also by another gateway or after a restart.

    Args:
        folder: absolute, below ``weights.source_roots`` as the ingest's node sees it.
        number: what the trainer calls the version; None: the folder's name may tell it. Where it is not newer than the
            newest version, the version has the next number: what is told is served, whatever its number, so that a
            trainer may go back to an earlier checkpoint.
        label: another name of the version; None: the folder's own, where that may be a label.
        mode: what becomes of running rollouts.
        timeout_s: for all of it.

    Raises InvalidRequest, Forbidden, NotFound, InvalidManifest, QuantizationError, InsufficientStorage,
    VersionConflict, or CommitTimeout, after which the same call goes on waiting.
    """
    if not Path(folder).is_absolute():
        raise InvalidRequest(f"{folder!r} is a relative path, and the ingest runs elsewhere: send an absolute one")
    number = number_of(folder) if number is None else number
    name = Path(folder).name
    label = name if label is None and is_label(name) else label
    request = CommitUpload(mode=mode, wait="all", timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            return await services.ingest.push_folder(Path(folder), request, number, label)
    except TimeoutError as error:
        raise CommitTimeout(
            f"{folder} is still being read and converted after {timeout_s:g} s, which goes on: send the same call again"
        ) from error


def is_worth_repeating(error: RolloutServiceError) -> bool:
    """Whether the same call may succeed if it is only sent again: some clients send it again after any 5xx."""
    return isinstance(error, NotReady | CommitTimeout) and not isinstance(error, DeploymentFailed)
