"""What this machine says of itself. What others would say comes from programs and files that stand in for theirs."""

import socket

import torch

from rollout_service.cli import machine


class TestGpus:
    def test_torch_says_what_it_is_built_for(self):
        cuda = machine.torch_cuda()
        assert (cuda.built_for, cuda.devices) == (torch.version.cuda, torch.cuda.device_count())
        assert bool(cuda.error) is (cuda.built_for is not None and not cuda.devices)


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
