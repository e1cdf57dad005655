"""The newest versions as the trainer sent them, in BF16, for the shadow: a log in ``<weights.root>/unquantized``.

It is only measured against. A failure here skips the comparison of that version, and never fails the version.
"""

import logging
import shutil
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import torch

from rollout_service.errors import LogCorrupt, RolloutServiceError
from rollout_service.model.convert import Converter, Named, tensor_bytes
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import TrainerRecipe, UploadTensor
from rollout_service.quant.formats import CODE_DTYPES, is_codes
from rollout_service.store.durable_io import read_sealed, write_sealed
from rollout_service.store.layout import Layout
from rollout_service.store.log import WeightLog, uploads_folder
from rollout_service.store.manifest import Manifest, ManifestDamaged, Recipe
from rollout_service.store.rollback import stage_again
from rollout_service.store.writer import VersionWriter

logger = logging.getLogger(__name__)
_TWIN_FILE = "quantized"
"""In each version's folder: the digest under which the quantized one was committed."""
_KEPT = 2
"""The newest and the one before, which the shadow may be reading."""


def unquantized_root(root: Path) -> Path:
    """Where that log lies, given ``weights.root``."""
    return root / "unquantized"


def remove_unquantized(root: Path) -> None:
    """Remove what an earlier service with a shadow has left below ``weights.root``."""
    folder = unquantized_root(root)
    if folder.exists():
        logger.info("shadow.share is 0: removing %s", folder)
        shutil.rmtree(folder, ignore_errors=True)


class UnquantizedCopy:
    """One staged version: takes a copy of each tensor on its way to the quantizer."""

    def __init__(self, log: WeightLog, version: int, fingerprint: str, converter: Converter, layout: Layout) -> None:
        """``fingerprint``: of the model. Raises OSError if the disk has no room for it."""
        self._log, self._version, self._fingerprint = log, version, fingerprint
        self._converter = converter
        self._folder = log.staging(version)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._writer = VersionWriter(self._folder, layout)
        self._sound = True

    def taken(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """The same tensors. Raises QuantizationError for NaN or infinity, as the conversion itself would."""
        for name, tensor in tensors:
            if self._sound:
                self._take(name, tensor)
            yield name, tensor

    def renumber(self, version: int) -> None:
        """Become the copy of another version."""
        folder = self._log.staging(version)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            self._folder.rename(folder)
        except OSError as error:
            self._lost(error)
        else:
            self._version, self._folder = version, folder

    def commit(self, digest: str) -> None:
        """Its quantized twin has been committed under that digest: make this one the newest, and drop old ones."""
        try:
            if self._sound:
                recipe, tensors = Recipe(weights="none"), self._writer.finish()
                manifest = Manifest(
                    version=self._version, fingerprint=self._fingerprint, recipe=recipe, tensors=tensors
                )
                write_sealed(self._folder / _TWIN_FILE, digest)
                self._log.commit(manifest, "wait")  # what the shadow is scoring with the version before, it finishes
            for version in self._log.versions()[:-_KEPT]:
                self._log.drop(version)
        except (OSError, LogCorrupt) as error:
            self._lost(error)

    def close(self) -> None:
        """Close the files."""
        self._writer.close()

    def remove_files(self) -> None:
        """Remove what is not committed."""
        self._writer.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        if is_codes(tensor):  # of a broadcast, which nobody announces as a whole
            self._lost(f"{name} came as codes")
            return
        try:
            for stored, converted in self._converter.convert([(name, tensor)]):
                self._writer.write(stored, tensor_bytes(converted))
        except OSError as error:
            self._lost(error)

    def _lost(self, why: object) -> None:
        self._sound = False
        logger.warning("version %d is not kept unquantized, and has no shadow: %s", self._version, why)


class UnquantizedLog:
    """Keeps the newest versions unquantized; written by the ingest alone."""

    def __init__(self, root: Path, model: ServedModel) -> None:
        """``root``: ``weights.root`` on this node."""
        self._log, self._model = WeightLog(unquantized_root(root)), model
        self._told = False

    def recover(self, quantized: WeightLog) -> None:
        """Remove what an ingest that died has left half done, and versions that are others in the log ``quantized``."""
        shutil.rmtree(uploads_folder(self._log.root), ignore_errors=True)
        try:
            self._log.remove_uncommitted()
            for version in self._log.versions():
                if not self._is_twin(version, quantized):
                    logger.warning("version %d is another now, and its unquantized copy is dropped", version)
                    self._log.withdraw(version)
        except (LogCorrupt, OSError, ManifestDamaged) as error:
            logger.warning("the unquantized versions are dropped: %s", error)
            shutil.rmtree(self._log.root, ignore_errors=True)

    def _is_twin(self, version: int, quantized: WeightLog) -> bool:
        head = quantized.head()
        if head is None or version > head.version:
            return False
        if version not in quantized.versions():  # dropped since: no rollout can be of it
            return True
        return read_sealed(self._log.folder(version) / _TWIN_FILE) == quantized.manifest(version).digest

    def roll_back(self, source: int, version: int, digest: str) -> None:
        """A kept version was committed again under that number and digest: its copy too, if it is here still."""
        try:
            if source not in self._log.versions():
                logger.warning(
                    "version %d is %d again, which is not kept unquantized any more: it has no shadow", version, source
                )
                return
            manifest = stage_again(self._log, self._log.manifest(source), version)
            write_sealed(self._log.staging(version) / _TWIN_FILE, digest)
            self._log.commit(manifest, "wait")
            for older in self._log.versions()[:-_KEPT]:
                self._log.drop(older)
        except (RolloutServiceError, OSError) as error:
            logger.warning("version %d is not kept unquantized, and has no shadow: %s", version, error)

    @cached_property
    def _converter(self) -> Converter:
        model = self._model
        recipe = TrainerRecipe(
            weights="none",
            keep_float32=tuple(sorted(model.keep_float32)),
            experts=model.experts,
            ignored=model.ignored,
        )
        return Converter(recipe, device="cpu")

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self._converter.slots(self._model.stored))

    def begin(self, version: int, table: Iterable[UploadTensor]) -> UnquantizedCopy | None:
        """A copy of a version that comes in these tensors; None if there is nothing to copy, or no room."""
        if any(tensor.dtype in CODE_DTYPES for tensor in table):
            if not self._told:
                logger.warning(
                    "version %d comes as codes: there is nothing unquantized to compare it with, and of such "
                    "versions the shadow measures nothing",
                    version,
                )
            self._told = True
            return None
        try:
            return UnquantizedCopy(self._log, version, self._model.fingerprint, self._converter, self._layout)
        except OSError as error:
            logger.warning("version %d is not kept unquantized, and has no shadow: %s", version, error)
            shutil.rmtree(self._log.staging(version), ignore_errors=True)
            return None
