"""Trainers that send what they should not, or not all of it, or twice. The service says no, and goes on."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import torch
import xxhash

from benchmarks.faults.ground import Case, Ground
from benchmarks.faults.kills import begin_parts, send_half, send_parts
from rollout_service.client import RolloutClient
from rollout_service.client._parts import Part
from rollout_service.client._sent_weights import SentWeights
from rollout_service.client._tensors import describe
from rollout_service.errors import (
    InvalidDelta,
    InvalidManifest,
    QuantizationError,
    RolloutServiceError,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.model.convert import Converter
from rollout_service.protocol.delta_parts import decode_header
from rollout_service.protocol.upload import BeginUpload, CommitUpload
from rollout_service.store.log import WeightLog

Fault = Callable[[Ground], Awaitable[None]]
Weights = dict[str, torch.Tensor]
LAYER = "model.layers.0."


class NotRefused(Exception):
    """The service took what it should have refused."""


def input_cases() -> Iterator[Case]:
    yield Case("a flipped byte in a part", flipped_part)
    yield Case("parts twice, late and out of order", shuffled_parts)
    yield Case("a part of another version", part_of_another_version)
    yield Case("commit twice", commit_twice)
    yield Case("an older version", older_version)
    yield Case("the same version with other bytes", other_bytes)
    yield Case("two trainers at once", two_trainers)
    yield Case("a trainer that dies half way", dying_trainer)
    yield Case("a delta whose base is gone", delta_without_its_base)
    yield Case("a corrupted delta", corrupted_delta)
    yield Case("ten updates in a row", ten_updates)
    for name, damage, error in (
        ("q without k and v", without("k_proj", "v_proj"), InvalidManifest),
        ("a missing name", without("layers.1.mlp.up_proj"), InvalidManifest),
        ("an unknown name", adding_unknown, InvalidManifest),
        ("a wrong shape", reshaping, InvalidManifest),
        ("NaN weights", setting(float("nan")), QuantizationError),
        ("infinite weights", setting(float("inf")), QuantizationError),
    ):
        yield Case(name, refused_push(damage, error))
    yield Case("a wrong dtype", wrong_dtype)


@contextlib.contextmanager
def refused(*errors: type[RolloutServiceError]) -> Iterator[None]:
    """The block raises one of ``errors``; raises NotRefused if it does not."""
    try:
        yield
    except errors:
        return
    raise NotRefused(f"expected {' or '.join(error.__name__ for error in errors)}")


def refused_push(damage: Callable[[Weights], Weights], error: type[RolloutServiceError]) -> Fault:
    """A push of damaged weights, which is refused; then a sound one, which is not."""

    async def fault(ground: Ground) -> None:
        version = ground.committed + 1
        with refused(error):
            await ground.client.push_weights(version, damage(ground.weights(version)))
        with contextlib.suppress(RolloutServiceError):
            await ground.client.discard(version)
        await ground.push(version)

    return fault


def without(*parts: str) -> Callable[[Weights], Weights]:
    """Leave out the tensors whose names hold one of ``parts``."""
    return lambda weights: {name: w for name, w in weights.items() if not any(part in name for part in parts)}


def adding_unknown(weights: Weights) -> Weights:
    return {**weights, "model.layers.0.mlp.side_proj.weight": torch.zeros(128, 128, dtype=torch.bfloat16)}


def reshaping(weights: Weights) -> Weights:
    name = LAYER + "mlp.up_proj.weight"
    return {**weights, name: weights[name].T.contiguous()}


def setting(value: float) -> Callable[[Weights], Weights]:
    """Set one weight to no number."""

    def damage(weights: Weights) -> Weights:
        weights[LAYER + "mlp.up_proj.weight"][3, 5] = value
        return weights

    return damage


async def wrong_dtype(ground: Ground) -> None:
    """float64, which the wire does not have."""
    begin = {"version": ground.committed + 1, "tensors": [{"name": "lm_head.weight", "dtype": "float64", "shape": [1]}]}
    with refused(RolloutServiceError):
        await ground.send("POST", "/v1/weights", json=begin)
    await ground.push(ground.committed + 1)


async def flipped_part(ground: Ground) -> None:
    """Change one bit of a part on the way; sent again it is taken."""
    version = ground.committed + 1
    part = (await begin_parts(ground, version))[0]
    damaged = bytes(part.data[:100]) + bytes([part.data[100] ^ 1]) + bytes(part.data[101:])
    with refused(RolloutServiceError):
        await ground.put_part(version, part.index, damaged, part.digest)
    await ground.push(version)


async def shuffled_parts(ground: Ground) -> None:
    """Send all parts twice, the last first."""
    version = ground.committed + 1
    parts = await begin_parts(ground, version)
    await send_parts(ground, version, [*reversed(parts), *parts])
    await ground.push(version)


async def part_of_another_version(ground: Ground) -> None:
    """A part sent to a version that nobody began, and to one that is committed."""
    data = bytes(1000)
    for version in (ground.committed, ground.committed + 100):
        with refused(RolloutServiceError):
            await ground.put_part(version, 0, data, xxhash.xxh3_128_hexdigest(data))
    await ground.push(ground.committed + 1)


async def commit_twice(ground: Ground) -> None:
    """The second commit gets the answer of the first."""
    version = ground.committed + 1
    await ground.push(version)
    first = await ground.client.weights(version)
    again = await ground.client._uploader.commit(version, CommitUpload())
    if first.digest != again.digest:
        raise NotRefused(f"digest {first.digest} became {again.digest}")


async def older_version(ground: Ground) -> None:
    """A version below the newest."""
    await ground.push(ground.committed + 2)
    with refused(VersionConflict):
        await ground.client.push_weights(ground.committed - 1, ground.weights(ground.committed - 1))


async def other_bytes(ground: Ground) -> None:
    """The newest version again, with the weights of another."""
    with refused(VersionConflict):
        await ground.client.push_weights(ground.committed, ground.weights(ground.committed + 5))


async def two_trainers(ground: Ground) -> None:
    """Two push different weights as the same version at the same time: one wins."""
    version = ground.committed + 1
    others = ground.weights(version)
    others["model.layers.0.mlp.up_proj.weight"][0, 0] = 1.0  # times a gate of zero: other bytes that tell the same
    async with RolloutClient(ground.service.url, token=ground.service.config.auth.secret()) as other:
        outcomes = await asyncio.gather(
            ground.client.push_weights(version, ground.weights(version)),
            other.push_weights(version, others),
            return_exceptions=True,
        )
    lost = [isinstance(outcome, VersionConflict | UploadIncomplete) for outcome in outcomes]
    if sum(lost) != 1:
        raise NotRefused(f"outcomes were {outcomes}")
    if lost[0]:  # the other's are committed: ours are no retry of them
        version += 1
    await ground.push(version)


async def dying_trainer(ground: Ground) -> None:
    """Half of a version, and never more; the next trainer begins with a newer one."""
    await send_half(ground, ground.committed + 1)
    await ground.push(ground.committed + 2)


async def delta_without_its_base(ground: Ground) -> None:
    """Other trainers' versions overtake the one that a trainer has sent last; its next delta becomes a whole push."""
    await ground.push(ground.committed + 1, transport="delta")
    base = ground.committed
    while base in WeightLog(ground.log).versions():
        await ground.push(ground.committed + 1)
    await ground.push(ground.committed + 1, transport="delta")
    status = await ground.client.weights(ground.committed)
    ground.note(f"version {base} was removed; version {ground.committed} is a delta of {status.delta_of}")


async def corrupted_delta(ground: Ground) -> None:
    """A bit of the changes is flipped before they are hashed and sent; then the same version comes as a whole."""
    version = ground.committed + 1
    converter = Converter(await ground.client.recipe(), device="cpu")
    old, new = (list(converter.convert(ground.weights(each).items())) for each in (ground.committed, version))
    sent = SentWeights(tuple(describe(name, tensor) for name, tensor in old))
    for _ in sent.take(old):
        pass
    sent.version = ground.committed
    made: list[Part] = []
    if sent.changes_to(new, made=made.append) is None:
        raise NotRefused("canary weights differ in too much to be a delta")
    begin = BeginUpload(version=version, tensors=sent.table, delta=sent.as_base())
    await ground.client._uploader.begin(begin)
    damaged = max(made, key=lambda part: part.nbytes)
    for part in made:
        data = bytearray(part.data)
        if part is damaged:
            sizes = [sent.table[number].nbytes for number in begin.delta_parts[part.index]]
            header = decode_header(memoryview(data), len(data), begin.delta_parts[part.index], sizes)
            data[(header.starts[0] + len(data)) // 2] ^= 0x10
        await ground.put_part(version, part.index, bytes(data), xxhash.xxh3_128_hexdigest(data))
    with refused(InvalidDelta):
        await ground.client._uploader.commit(version, CommitUpload())
    nbytes = sum(part.nbytes for part in made)
    ground.note(f"one of {nbytes} bytes of the changes from version {sent.version} to {version} was wrong")
    await ground.push(version)


async def ten_updates(ground: Ground) -> None:
    """Push one right after the other, without waiting for replicas."""
    for _ in range(10):
        await ground.push(ground.committed + 1, wait="none")
