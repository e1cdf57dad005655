"""SkyRL's rollout client and its weight-sync client, in a process of their own.

python -m tests.clients.skyrl_client REPLIES URL MODEL
"""

import sys
import typing

import typing_extensions

if sys.version_info < (3, 12):
    # SkyRL is for Python 3.12. All that these two clients need of it is that pydantic takes typing's TypedDict.
    typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient, nccl_init_payloads

from tests.clients.lines import answer


class Weights(SkyrlWeightSyncClient):
    """What the trainer engine does in a ``with`` statement, as one call."""

    def start_draft_weight_update(self) -> None:
        with self.draft_session():
            self.start_weight_update()


def main(replies: str, url: str, model: str) -> None:
    rollouts = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=model)
    answer(replies, {"rollouts": rollouts, "weights": Weights([url], init_payload_fn=nccl_init_payloads)})


if __name__ == "__main__":
    main(*sys.argv[1:])
