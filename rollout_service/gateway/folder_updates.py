"""Weight updates from a folder, shared by the APIs whose trainers send a folder's path.

A successful reply means that every live replica serves the folder's weights and nothing reads the folder any more. The
trainer may then delete it. Sources: prime-rl 559b447 ``utils/client.py``, slime 624b824 ``sglang_engine.py``, AReaL
cbff54d ``remote_inf_engine.py``.
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
"""Maximum wait for a version in seconds. prime-rl waits 720 s for the reply, and then repeats the call."""
FolderPath = Annotated[str, Field(min_length=1, max_length=4096)]
_NUMBERED = re.compile(r"(?:.*_)?step_(\d{1,15})|weight(?:_update)?_v(\d{1,15})")


def number_of(folder: str) -> int | None:
    """Return the version number in a folder's name, or None if the name has none.

    Recognizes ``step_7`` (prime-rl), ``weight_v000007`` (slime) and ``weight_update_v7`` (AReaL).
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
    """Make the weights in ``folder`` the next version, and return once every live replica serves it.

    A repeated call with the same folder and files joins the running update. If that version is already the newest, the
    call returns at once. ``Uploads.begin_folder`` explains how repetition is detected, even by another gateway or after
    a restart.

    Args:
        services: the gateway's dependencies.
        folder: absolute path below ``weights.source_roots``, as seen on the ingest's node.
        number: the trainer's version number. None: taken from the folder's name, if it has one. If the number is not
            newer than the newest version, the next free number is used. A trainer may therefore return to an earlier
            checkpoint.
        label: the label of the version. None: the folder's name, if it is a valid label.
        mode: the fate of running rollouts.
        timeout_s: maximum seconds for the whole update.

    Raises:
        InvalidRequest, Forbidden, NotFound: The folder is unusable.
        InvalidManifest, QuantizationError: The weights are unusable.
        InsufficientStorage, VersionConflict: The version cannot be stored.
        CommitTimeout: The update continues; the same call waits for it again.
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
    """Return True if the same call may succeed when repeated. Some clients repeat a call after any 5xx."""
    return isinstance(error, NotReady | CommitTimeout) and not isinstance(error, DeploymentFailed)
