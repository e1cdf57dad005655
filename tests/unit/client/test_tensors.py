import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest
import torch
import xxhash

from rollout_service.client import _parts
from rollout_service.client._parts import bytes_of_each, cut_parts
from rollout_service.client._tensors import TensorSource, checksum, describe
from rollout_service.model.convert import tensor_bytes
from rollout_service.protocol.upload import UploadTensor


def views(*sizes: int) -> list[torch.Tensor]:
    """Views of these many bytes, counting up over all of them."""
    return list((torch.arange(sum(sizes)) % 256).to(torch.uint8).split(sizes))


class TestParts:
    @pytest.mark.parametrize("held", [False, True])
    @pytest.mark.parametrize("sizes", [(10,), (4, 1, 4, 1, 1, 5), (1, 0, 7, 2), (13, 1), (3,), (6,), (0,), ()], ids=str)
    async def test_parts_are_the_stream_cut_at_multiples_of_their_size(self, monkeypatch, sizes, held):
        monkeypatch.setattr(_parts, "VIEWED_BYTES", 3)
        tensors, free, index = views(*sizes), list[torch.Tensor](), -1
        stream = b"".join(view.numpy().tobytes() for view in tensors)
        for index, part in enumerate(cut_parts(tensors, 6, free, held=held)):
            expected = stream[6 * index : 6 * index + 6]
            assert b"".join(part.pieces) == bytes(part.data) == b"".join([chunk async for chunk in part]) == expected
            assert (part.index, part.nbytes) == (index, len(expected))
            assert part.digest == xxhash.xxh3_128_hexdigest(expected)
            if part.memory is not None:
                free.append(part.memory)
        assert index + 1 == -(-len(stream) // 6)

    def test_a_part_does_not_change_with_its_tensor(self):
        tensor = torch.zeros(4, dtype=torch.float16)
        part = next(cut_parts(bytes_of_each([("t", tensor)]), part_bytes=8))
        tensor.fill_(1)
        assert bytes(part.data) == bytes(8)

    def test_pieces_of_held_tensors_are_views_and_copies_next_to_each_other_are_one_piece(self, monkeypatch):
        monkeypatch.setattr(_parts, "VIEWED_BYTES", 3)
        tensors = views(4, 1, 2, 5)
        first, second = cut_parts(tensors, 10, held=True)
        assert [piece.nbytes for piece in first.pieces] == [4, 3, 3] and first.memory is not None
        assert [piece.nbytes for piece in second.pieces] == [2] and second.memory is not None
        for tensor in tensors:
            tensor.zero_()
        assert bytes(first.data) == bytes(4) + b"\4\5\6" + bytes(3) and bytes(second.data) == b"\12\13"
        [whole] = cut_parts(views(9), 10, held=True)
        assert whole.memory is None

    async def test_a_part_can_be_read_twice(self):
        [part] = cut_parts(views(3_000_000), part_bytes=1 << 22)
        for _ in range(2):
            chunks = [chunk async for chunk in part]
            assert b"".join(chunks) == part.data
            assert len(chunks) == 3

    def test_the_memory_of_a_finished_part_is_reused_for_a_later_one(self):
        free: list[torch.Tensor] = []
        parts = cut_parts(views(4, 4, 4, 1), 4, free)
        first, second = next(parts), next(parts)
        assert first.memory is not None
        free.append(first.memory)
        third = next(parts)
        assert third.memory is first.memory and second.memory is not first.memory
        assert [bytes(part.data) for part in (second, third, next(parts))] == [b"\4\5\6\7", b"\10\11\12\13", b"\14"]


class TestBytes:
    def test_they_are_exact_row_by_row_and_not_copied(self):
        for dtype, shape in itertools.product([torch.float32, torch.bfloat16, torch.float16], [(3, 5), (), (0, 7)]):
            tensor = torch.nn.Parameter(torch.randn(shape).to(dtype))
            again = torch.frombuffer(bytearray(tensor_bytes(tensor)) or bytearray(8), dtype=dtype)[: tensor.numel()]
            assert torch.equal(again.reshape(shape), tensor)
        strided = torch.arange(6, dtype=torch.float32).reshape(2, 3).t()
        assert bytes(tensor_bytes(strided)) == bytes(tensor_bytes(torch.tensor([[0.0, 3], [1, 4], [2, 5]])))
        tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
        view = tensor_bytes(tensor)
        tensor.fill_(1)
        assert bytes(view) == b"\x80\x3f" * 6

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float8_e5m2, torch.bool], ids=str)
    def test_another_dtype_is_refused_by_name(self, dtype):
        with pytest.raises(ValueError, match=rf"tensor layer\.w is {str(dtype)[6:]}.*cast it first"):
            describe("layer.w", torch.zeros(2).to(dtype))

    @pytest.mark.parametrize(
        ("make", "complaint"),
        [
            (lambda: torch.ones(2, 2, device="meta"), "on the meta device and has no values; load"),
            (lambda: torch.ones(2, 2).to_sparse(), r"layout is torch\.sparse_coo; send tensor\.to_dense"),
            (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"send tensor\.dequantize"),
            (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "is nested; send each"),
            (lambda: torch.ones(2, 2).numpy(), r"is a ndarray; give a torch\.Tensor"),
            (lambda: None, r"is a NoneType; give a torch\.Tensor"),
        ],
        ids=["meta", "sparse", "quantized", "nested", "numpy", "none"],
    )
    def test_a_tensor_without_plain_bytes_is_refused_by_name(self, make, complaint):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls some of them deprecated
            tensor = make()
        table = [UploadTensor(name="w", dtype="float32", shape=(2, 2))]
        for pairs, known in [({"w": tensor}, None), (iter([("w", tensor)]), None), ({"w": tensor}, table)]:
            with pytest.raises(ValueError, match=f"tensor w cannot be sent: .*{complaint}"):
                list(TensorSource(pairs, known))

    @pytest.mark.parametrize("known", [None, [UploadTensor(name="w", dtype="float32", shape=(2, 2))]])
    def test_what_is_no_pairs_is_refused(self, known):
        weight, pairs = torch.ones(2, 2), r"give a module, a mapping, or pairs"
        for given in ([weight], iter([weight]), "weights", None):
            with pytest.raises(ValueError, match=pairs):
                list(TensorSource(given, known))

    def test_tensors_without_names_are_refused(self):
        with pytest.raises(ValueError, match="its name is a int; give pairs of a name and a tensor"):
            TensorSource(dict(enumerate([torch.ones(2)])), None)


TABLE = (
    UploadTensor(name="a", dtype="float32", shape=(2,)),
    UploadTensor(name="b", dtype="bfloat16", shape=(1, 3)),
)


class TestTable:
    def test_a_module_is_sent_with_both_tied_names_and_its_buffers(self):
        module = torch.nn.Module()
        module.embed = torch.nn.Embedding(4, 2)
        module.head = torch.nn.Linear(2, 4, bias=False)
        module.head.weight = module.embed.weight
        module.register_buffer("bias", torch.zeros(3))
        assert [entry.name for entry in TensorSource(module, None).table] == ["bias", "embed.weight", "head.weight"]

    def test_no_tensors_and_two_of_one_name_are_refused(self):
        for nothing in ({}, iter(())):
            with pytest.raises(ValueError, match="no tensors"):
                TensorSource(nothing, None)
        with pytest.raises(ValueError, match="tensor a comes twice"):
            TensorSource([("a", torch.ones(1)), ("a", torch.ones(1))], None)

    @pytest.mark.parametrize(
        ("tensors", "complaint"),
        [
            ({"a": torch.zeros(2)}, r"the table says b bfloat16\[1, 3\], but the tensors ended"),
            ({"b": torch.zeros(2)}, r"the table says a float32\[2\], then came b float32\[2\]"),
            ({"a": torch.zeros(3)}, r"then came a float32\[3\]"),
            ({"a": torch.zeros(2).half()}, r"then came a float16\[2\]"),
            (
                {"a": torch.zeros(2), "b": torch.zeros(1, 3).bfloat16(), "c": torch.zeros(1)},
                r"the table says nothing more, then came c float32\[1\]",
            ),
        ],
        ids=["too few", "other name", "other shape", "other dtype", "too many"],
    )
    def test_tensors_that_differ_from_their_table_are_refused(self, tensors, complaint):
        with pytest.raises(ValueError, match=complaint):
            list(TensorSource(iter(tensors.items()), TABLE))


def through_one_buffer(
    tensors: dict[str, torch.Tensor], kind: type[torch.Tensor] = torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in the same memory, as trainers gather them."""
    buffer = torch.empty(max(tensor.numel() for tensor in tensors.values()))
    for name, tensor in tensors.items():
        view = buffer[: tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        yield name, torch.nn.Parameter(view) if kind is torch.nn.Parameter else view


class TestOneBuffer:
    WEIGHTS: ClassVar = {"a": torch.rand(40, 50), "b": torch.rand(2000), "c": torch.rand(7)}

    def test_a_mapping_that_makes_its_tensors_is_read_right(self):
        class Gathered(Mapping[str, torch.Tensor]):
            buffer = torch.empty(2000)

            def __getitem__(self, name: str) -> torch.Tensor:
                tensor = TestOneBuffer.WEIGHTS[name]
                return self.buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

            def __iter__(self) -> Iterator[str]:
                return iter(TestOneBuffer.WEIGHTS)

            def __len__(self) -> int:
                return len(TestOneBuffer.WEIGHTS)

        kept = dict(TensorSource(Gathered(), None).begin(own_memory=True))
        assert all(torch.equal(tensor, self.WEIGHTS[name]) for name, tensor in kept.items())

    def test_parameters_in_one_buffer_are_refused_by_name(self):
        source = TensorSource(through_one_buffer(self.WEIGHTS, torch.nn.Parameter), None)
        with pytest.raises(ValueError, match=r"2 tensors, such as a, were overwritten .*nothing is committed"):
            list(source)

    def test_parameters_that_share_their_memory_are_taken(self):
        tied = torch.nn.Parameter(torch.rand(4, 6))
        source = TensorSource(
            iter([("embed", tied), ("head", tied), ("half", torch.nn.Parameter(tied.data[:2]))]), None
        )
        assert [tensor.data_ptr() for _, tensor in source] == [tied.data_ptr()] * 3

    @pytest.mark.parametrize("count", [0, 1, 3, 4, 4100])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
    def test_a_checksum_is_of_every_element(self, count, dtype):
        tensor = torch.ones(count + 1).to(dtype)[1:]  # not at a word's border
        before = checksum(tensor)
        assert torch.equal(before, checksum(tensor.clone()))
        for place in {0, count // 2, count - 1} & set(range(count)):
            other = tensor.clone()
            other[place] = 2
            assert not torch.equal(before, checksum(other))
