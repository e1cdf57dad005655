"""An ingest in a process of its own. For each version on its input it stages the model's weights, then commits them.

``python -m tests.unit.store.committer`` starts such a process for each line "MODEL ROOT" of its input, prints its id,
and waits for its end.
"""

import asyncio
import os
import sys
from pathlib import Path

from transformers.models.qwen3 import modeling_qwen3  # noqa: F401 - otherwise imported in each process

from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.upload import CommitUpload
from tests.unit.ingest.trainer import Trainer, config_of, folder_weights


async def main(model: Path, root: Path) -> None:
    ingest = Ingest(config_of(model, root))
    await ingest.start()
    trainer, tensors = Trainer(ingest), folder_weights(model)
    for line in sys.stdin:
        await trainer.upload(int(line), tensors)
        _tell("staged")
        sys.stdin.readline()  # until the test is ready
        await ingest.commit(int(line), CommitUpload())
        _tell("committed")


def _tell(state: str) -> None:
    sys.stdout.write(f"{state}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for line in sys.stdin:  # the imports take seconds: once for all
        if (child := os.fork()) == 0:
            sys.exit(asyncio.run(main(*map(Path, line.split()))))
        _tell(str(child))
        os.waitpid(child, 0)
