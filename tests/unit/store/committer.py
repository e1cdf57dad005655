"""An ingest in a process of its own. For each version on its input it stages the model's weights, then commits them.

python -m tests.unit.store.committer MODEL ROOT
"""

import asyncio
import sys
from pathlib import Path

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
    asyncio.run(main(*map(Path, sys.argv[1:])))
