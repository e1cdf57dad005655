"""SkyRL's weight-sync client in a process of its own: SkyRL needs Python 3.12.

Run as a program with the URL of a service: takes ``[method, arguments]`` as
a line of JSON, calls that method of ``SkyrlWeightSyncClient``, and answers with its error or null.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class SkyrlClient:
    """The client there, with the methods that vLLM's trainer engines call, and SkyRL's own beside them.

    Each raises RuntimeError with what SkyRL's raised.
    """

    def __init__(self, python: str, folder: Path, url: str) -> None:
        """``python``: an interpreter of 3.12. ``folder``: where SkyRL is installed."""
        self._process = subprocess.Popen(
            [python, __file__, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(folder)},
        )

    def call(self, method: str, *arguments: Any) -> None:
        """Any method of SkyRL's client."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)
        error = json.loads(self._process.stdout.readline())
        if error is not None:
            raise RuntimeError(error)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main(url: str) -> None:
    from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient, nccl_init_payloads

    client = SkyrlWeightSyncClient([url], init_payload_fn=nccl_init_payloads)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        error = None
        try:
            if method == "start_draft_weight_update":
                with client.draft_session():
                    client.start_weight_update()
            else:
                getattr(client, method)(*arguments)
        except RuntimeError as failure:
            error = str(failure)
        sys.stdout.write(f"{json.dumps(error)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
