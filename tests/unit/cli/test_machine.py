"""What this machine says of itself. What others would say comes from programs and files that stand in for theirs."""

import socket

import psutil
import pytest
import torch

from rollout_service.cli import machine


class TestGpus:
    def test_torch_says_what_it_is_built_for(self):
        cuda = machine.torch_cuda()
        assert (cuda.built_for, cuda.devices) == (torch.version.cuda, torch.cuda.device_count())
        assert bool(cuda.error) is (cuda.built_for is not None and not cuda.devices)

    def test_nvcc_is_told_with_its_release(self, program, tmp_path):
        program("nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
        assert machine.nvcc() == f"{tmp_path / 'nvcc'}, 13.0"

    def test_without_nvcc_there_is_none(self, program, monkeypatch):
        monkeypatch.setattr(machine, "_NVCC", "/nowhere/nvcc")
        assert machine.nvcc() is None


class TestDisks:
    def test_a_folder_that_is_not_there_yet(self, tmp_path):
        disk = machine.disk(tmp_path / "out" / "weights")
        assert disk.folder == tmp_path / "out" / "weights" and disk.writable
        assert 0 < disk.free_bytes <= psutil.disk_usage(str(tmp_path)).total

    def test_a_file_in_the_way_is_told(self, tmp_path):
        (tmp_path / "out").write_text("")
        with pytest.raises(NotADirectoryError, match="out is no folder"):
            machine.disk(tmp_path / "out" / "weights")


class TestPorts:
    def test_a_port_that_is_taken_is_told(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert machine.why_not_bound("127.0.0.1", port) == "taken by another process"
            assert machine.why_not_bound("0.0.0.0", port) == "taken by another process"
        assert machine.why_not_bound("127.0.0.1", port) is None

    def test_an_address_of_another_machine_is_told(self):
        assert "Cannot assign requested address" in (machine.why_not_bound("192.0.2.1", 8000) or "")


class TestPackages:
    def test_versions_are_those_installed(self):
        assert machine.installed("torch") == torch.__version__
        assert machine.installed("no-such-package") is None
