"""TRL's GRPOTrainer in server mode, unmodified: through this service as it is shipped, and with TRL's own server.

    python -m benchmarks.trainers.trl --prepare --folder F        makes the model: two minutes on a GPU
    python -m benchmarks.trainers.trl --side ours --folder F      then --side own
    python -m benchmarks.trainers.trl --report                    docs/trainers/trl.png and the table of its page

Two GPUs, the first two of CUDA_VISIBLE_DEVICES: the trainer has one, the server the other. Each side is a case of
benchmarks/results/<machine>/trainers.json.
"""

import sys
from pathlib import Path

from benchmarks.common.command import run
from benchmarks.trainers.sides import Run, SideOptions, perform, service_command, steps_of


class TrlOptions(SideOptions):
    """What is done."""

    group_port: int = 51216
    """On which the trainer awaits the server; TRL's default."""


def main(asked: TrlOptions) -> None:
    """Make the model, run one side, or report."""
    perform(asked, "trl", processes)


def processes(asked: TrlOptions, folder: Path) -> Run:
    """Return the processes of a side: its server as its documentation has users type it, and the same trainer."""
    model = str(asked.folder.absolute())
    own = [sys.executable, "-m", "trl.scripts.vllm_serve", "--model", model, "--port", str(asked.port)]
    given = {"folder": model, "url": asked.url, "server-limit-s": asked.limit_s, "out": steps_of(folder)}
    given |= {"steps": asked.steps, "group-port": asked.group_port}
    options = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return Run(
        server=service_command(asked) if asked.side == "ours" else own,
        command=[sys.executable, "-m", "benchmarks.trainers.trl_training", *options],
    )


if __name__ == "__main__":
    run(main)
