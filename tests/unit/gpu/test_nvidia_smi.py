"""The GPUs that nvidia-smi lists. A shell script stands in for it; its lines are those of an H100's driver 580."""

import pytest

from rollout_service.cli import machine
from rollout_service.gpu import nvidia_smi

SMI = """\
0, NVIDIA H200, 143771, 143158, 9.0, 570.86.15, GPU-e20b193f-512d
1, NVIDIA GeForce RTX 4090, 24564, 1012, 8.9, 570.86.15, GPU-11111111-512d
"""
APPS = """\
GPU-11111111-512d, 639, /usr/bin/python3 -c a, b, 4706
GPU-11111111-512d, [Not Found], [Not Found], [N/A]
"""


def test_each_line_of_nvidia_smi_is_a_gpu(program):
    program("nvidia-smi", f"printf %s '{SMI}'")
    large, small = nvidia_smi.gpus()
    assert (large.name, large.memory_bytes, large.compute_capability) == ("NVIDIA H200", 143771 << 20, (9, 0))
    assert (small.index, small.free_bytes, small.driver) == (1, 1012 << 20, "570.86.15")
    assert small.uuid == "GPU-11111111-512d" and machine.is_gpu_host()


def test_without_nvidia_smi_there_are_no_gpus(program):
    assert nvidia_smi.gpus() == () == nvidia_smi.holders() and not machine.is_gpu_host()


def test_a_driver_that_fails_is_told(program):
    program("nvidia-smi", 'echo "Failed to initialize NVML: $@"; exit 18')
    with pytest.raises(OSError, match=r"exit status 18: Failed .*,uuid --format=csv,noheader,nounits"):
        nvidia_smi.gpus()
    assert machine.is_gpu_host()
    with pytest.raises(ValueError, match=r"'0, GB10, \[N/A\].*' instead of index, name"):
        nvidia_smi.gpus_from("0, GB10, [N/A], [N/A], 12.1, 580.1, GPU-a")


@pytest.mark.parametrize(
    ("visible", "left"),
    [(None, [0, 1]), ("1", [1]), ("1, 0", [0, 1]), ("GPU-e20b", [0]), ("", []), ("10", []), ("MIG-e20b", [])],
)
def test_only_visible_gpus_count(program, monkeypatch, visible, left):
    program("nvidia-smi", f"printf %s '{SMI}'")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in nvidia_smi.visible_gpus()] == left


def test_who_holds_a_gpu_is_told():
    gpus, holders = nvidia_smi.gpus_from(SMI), nvidia_smi.holders_from(APPS)
    assert nvidia_smi.find_taken(gpus, holders, 0.85) == {
        1: "1.1 GB of 25.8 GB are free, and engine.gpu_memory_utilization: 0.85 asks for 21.9 GB; "
        "in use by process 639 (/usr/bin/python3 -c a, b)"
    }
    assert "a process that is not seen from here" in nvidia_smi.find_taken(gpus, (), 0.85)[1]
    assert nvidia_smi.find_taken(gpus, holders, 0.01) == {}


def test_a_process_may_have_any_bytes_as_its_name(program):
    program("nvidia-smi", r"printf 'GPU-1, 639, \377, 4706\n'")
    assert [(holder.pid, holder.name) for holder in nvidia_smi.holders()] == [(639, "\N{REPLACEMENT CHARACTER}")]
