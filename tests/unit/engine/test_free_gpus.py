"""A replica on a GPU that another process uses. A shell script stands in for nvidia-smi."""

from pathlib import Path

import pytest

from rollout_service.engine.free_gpus import GpuTaken, wait_for_free_gpus

FREE = "0, a GPU, 80000, 79000, 9.0, 580.1, GPU-a\n1, a GPU, 80000, 79000, 9.0, 580.1, GPU-b\n"
TAKEN = FREE.replace("1, a GPU, 80000, 79000", "1, a GPU, 80000, 12000")


class Machine:
    """A host with two GPUs, on whose second one a trainer may be; and what the replica said and waited."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told, self.naps = folder, list[str | None](), 0
        self.others_serve, self.free_after = True, 3
        (folder / "nvidia-smi").write_text(
            f'#!/bin/sh\ncase "$1" in\n--query-gpu*) while read -r line; do echo "$line"; done < {folder}/gpus ;;\n'
            '*) echo "GPU-b, 639, trainer, 67000" ;;\nesac\n'
        )
        (folder / "nvidia-smi").chmod(0o755)
        self.lists(TAKEN)

    def lists(self, gpus: str) -> None:
        (self.folder / "gpus").write_text(gpus)

    async def others(self) -> bool:
        return self.others_serve

    async def sleep(self, seconds: float) -> None:
        self.naps += 1
        if self.naps == self.free_after:
            self.lists(FREE)

    async def wait(self, *devices: str, share: float = 0.85) -> None:
        await wait_for_free_gpus(devices, share, self.told.append, self.others, self.sleep)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("PATH", str(tmp_path))
    return Machine(tmp_path)


async def test_a_replica_waits_while_a_trainer_has_its_gpu(machine, caplog):
    machine.free_after = 10  # longer than one alone would wait
    with caplog.at_level("WARNING"):
        await machine.wait("1")
    reason = "GPU 1: 12.6 GB of 83.9 GB are free, and engine.gpu_memory_utilization: 0.85 asks for 71.3 GB"
    assert machine.naps == 10 and machine.told[-1] is None
    assert machine.told[:-1] == [f"{reason}; in use by process 639 (trainer)"] * 10
    assert len(caplog.records) == 1


async def test_a_replica_alone_fails_with_the_reason(machine):
    machine.others_serve, machine.free_after = False, 1000
    with pytest.raises(GpuTaken, match=r"GPU 1: 12\.6 GB .*process 639 \(trainer\): end that process, .*CUDA_VISIBLE"):
        await machine.wait("0", "1")
    assert machine.naps > 0  # memory of an engine that has just ended takes a moment


async def test_a_replica_alone_outlasts_an_engine_that_ends(machine):
    machine.others_serve, machine.free_after = False, 1
    await machine.wait("GPU-b")
    assert machine.naps == 1


@pytest.mark.parametrize(("devices", "share"), [(("0",), 0.85), ((), 0.85), (("1",), 0.1), (("MIG-b",), 0.85)])
async def test_a_free_gpu_is_not_waited_for(machine, devices, share):
    await machine.wait(*devices, share=share)
    assert machine.told == [None] and machine.naps == 0


async def test_without_an_answer_vllm_decides(machine, caplog):
    (machine.folder / "nvidia-smi").write_text("#!/bin/sh\necho no driver; exit 9\n")
    await machine.wait("1")
    assert machine.naps == 0 and "vLLM will tell" in caplog.text
