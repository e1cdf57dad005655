"""What is launched again is what Triton compiled for arguments like these; ``tests/gpu`` runs it."""

from collections.abc import Callable
from typing import Any

from rollout_service.engine.attention.launching import RepeatedLaunch


class Kernel:
    """In the place of Triton's, whose launches need a GPU: it returns what it compiled for a launch."""

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles
        self.launched: list[tuple[str, Any, tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., "Compiled | None"]:
        def launch(*arguments: Any, num_warps: int) -> "Compiled | None":
            self.launched.append((f"compiled for {num_warps} warps", grid, arguments))
            return Compiled(self) if self.compiles else None

        return launch


class Compiled:
    """What it returns, to launch once more."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.kernel.launched.append(("as compiled", grid, arguments))


def test_what_was_compiled_is_launched_again_for_the_same_key_alone():
    kernel = Kernel()
    launch = RepeatedLaunch(kernel, num_warps=4)
    launch(8, "aligned", 1, 2)
    launch(5, "aligned", 3, 4)
    launch(5, "not aligned", 5, 6)
    launch(9, "aligned", 7, 8)
    assert kernel.launched == [
        ("compiled for 4 warps", (8,), (1, 2)),
        ("as compiled", (5, 1, 1), (3, 4)),
        ("compiled for 4 warps", (5,), (5, 6)),
        ("as compiled", (9, 1, 1), (7, 8)),
    ]


def test_where_nothing_is_compiled_each_launch_is_the_kernels_own():
    kernel = Kernel(compiles=False)
    launch = RepeatedLaunch(kernel, num_warps=4)
    launch(8, "aligned", 1)
    launch(8, "aligned", 2)
    assert [what for what, _, _ in kernel.launched] == ["compiled for 4 warps"] * 2
