"""Versions whose tensors lie at the same places share what follows from that."""

import pytest
from msgspec.structs import replace

from rollout_service.protocol.tensors import TensorSlot
from rollout_service.store.layout import Layout, TensorPlace, TensorPlaces
from rollout_service.store.manifest import Manifest, Recipe, StoredTensor

PLACE = TensorPlace("a", "int8", (4, 3), "file", 8, 12)
OTHERS = [
    PLACE._replace(name="b"),
    PLACE._replace(dtype="bfloat16"),
    PLACE._replace(shape=(3, 4)),
    PLACE._replace(file="other"),
    PLACE._replace(offset=16),
]


def stored(*places: TensorPlace) -> tuple[StoredTensor, ...]:
    return tuple(StoredTensor(*place, digest="aa") for place in places)


def version(*tensors: StoredTensor) -> Manifest:
    return Manifest(version=1, fingerprint="model", recipe=Recipe(weights="none"), tensors=tensors)


def test_digests_tell_versions_of_other_places_whatever_their_order():
    assert len({TensorPlaces([each]).digest for each in [PLACE, *OTHERS]}) == 6
    after = TensorPlace("0", "int8", (4,), "file", 20, 4)
    assert TensorPlaces([PLACE, after]).digest == TensorPlaces([after, PLACE]).digest


def test_slots_are_names_dtypes_and_shapes_not_places():
    slots_digests = [TensorPlaces([each]).slots_digest for each in [PLACE, *OTHERS]]
    assert len(set(slots_digests[:4])) == 4 and set(slots_digests[4:]) == {slots_digests[0]}
    elsewhere = TensorPlace("b", "int8", (4,), "file", 0, 4)
    assert TensorPlaces([PLACE, elsewhere]).slots_digest == TensorPlaces([elsewhere, OTHERS[3]]).slots_digest


def test_versions_share_the_same_places_and_no_others():
    first, second = version(*stored(PLACE)), version(*(replace(t, digest="bb") for t in stored(PLACE)))
    assert first.places is second.places is second.replace(version=2).places
    for other in [*OTHERS, PLACE._replace(nbytes=13)]:
        assert version(*stored(PLACE)).places is not version(*stored(other)).places


def test_few_are_kept():
    first = TensorPlaces.of([PLACE])
    assert TensorPlaces.of([PLACE]) is first
    for number in range(10):
        TensorPlaces.of([PLACE._replace(offset=100 + number)])
    assert TensorPlaces.of([PLACE]) is not first


@pytest.mark.parametrize(
    "changed", [lambda tensors: tensors, lambda tensors: tensors[::-1]], ids=["as laid out", "back"]
)
def test_files_and_headers_are_those_of_the_layout(changed):
    layout = Layout([TensorSlot(name=name, dtype="bfloat16", shape=(4,)) for name in "cab"], max_file_bytes=16)
    tensors = stored(*layout.places.values())
    manifest = version(*changed(tensors))
    places = manifest.places
    assert places.digest == layout.digest
    assert manifest.in_order() == tensors
    assert {file: [t.name for t in held] for file, held in manifest.files().items()} == {
        layout.files[0].name: ["c", "a"],
        layout.files[1].name: ["b"],
    }
    for file in layout.files:
        header = places.headers[file.name]
        assert (header.text, len(header.text) + header.data_bytes) == (file.header, file.nbytes)
    assert (places.nbytes, list(places.files)) == (24, [file.name for file in layout.files])
