"""TRL's GRPOTrainer in server mode, unmodified: through this service as it is shipped, and with TRL's own server.

    python -m benchmarks.trainers.trl --prepare --folder F        makes the model: two minutes on a GPU
    python -m benchmarks.trainers.trl --side ours --folder F      then --side own
    python -m benchmarks.trainers.trl --report                    docs/trainers/trl.png and the table of its page

Two GPUs, the first two of CUDA_VISIBLE_DEVICES: the trainer has one, the server the other. Each side is a case of
benchmarks/results/<machine>/trainers.json.
"""

import sys
from functools import partial
from typing import Literal

from benchmarks.common.command import run
from benchmarks.trainers.sides import Run, SideOptions, folder_of, perform, service_command, steps_of
from benchmarks.trainers.trl_training import Place, Training

_TRL_SERVE = [sys.executable, "-m", "trl.scripts.vllm_serve"]
RESULT = "trainers"
Side = Literal["ours", "own"]


class TrlOptions(SideOptions):
    """What is done."""

    side: Side | None = None
    """Whose server: this service's, or TRL's."""


def main(asked: TrlOptions, training: Training) -> None:
    """Make the model, run one side, or report."""
    perform(asked, "trl", RESULT, partial(processes, asked, asked.side, training) if asked.side else None)


def processes(asked: TrlOptions, side: Side, training: Training) -> Run:
    """Return the processes of a side."""
    folder = folder_of(asked, "trl", side)
    place = Place(folder=asked.folder.absolute(), url=asked.url, server_limit_s=asked.limit_s, out=steps_of(folder))
    return Run(
        trainer="trl",
        side=side,
        result=RESULT,
        settings=training.model_dump(),
        folder=folder,
        server=server_command(side, asked),
        command=trainer_command(training, place),
    )


def server_command(side: Side, asked: TrlOptions) -> list[str]:
    """Return what each side's documentation has users type."""
    if side == "ours":
        return service_command(asked)
    return [*_TRL_SERVE, "--model", str(asked.folder.absolute()), "--port", str(asked.port)]


def trainer_command(training: Training, place: Place) -> list[str]:
    """Return the trainer's command: the same for every side."""
    given = {**training.model_dump(), **place.model_dump()}
    options = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "benchmarks.trainers.trl_training", *options]


if __name__ == "__main__":
    run(main)
