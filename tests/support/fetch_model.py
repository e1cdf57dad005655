"""What a process of the service does with a model on the hub, in a process of its own.

huggingface_hub reads ``HF_ENDPOINT`` and ``HF_HOME`` when it is imported. Standard input: the section ``model`` of a
configuration, in JSON. The last line of standard output is that section with the files on this node.
"""

import argparse
import logging
import sys

from rollout_service.config import ServiceConfig
from rollout_service.model import hub


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", action="store_true", help="the safetensors, too")
    parser.add_argument("--log-every", type=float, default=hub.LOG_EVERY_S)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    hub.LOG_EVERY_S = arguments.log_every
    config = ServiceConfig.model_validate_json(f'{{"model": {sys.stdin.read()}}}')
    try:
        here = hub.with_model_here(hub.pinned(config.resolved()), weights=arguments.weights)
    except hub.ModelNotDownloaded as error:
        sys.exit(f"ModelNotDownloaded: {error}")
    sys.stdout.write(here.model.model_dump_json())


if __name__ == "__main__":
    main()
