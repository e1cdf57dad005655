"""The newest versions as the trainer sent them, in BF16, for the shadow: a log in ``<weights.root>/unquantized``.

It is only used for measurements. A failure here skips the comparison of that version, and never fails the version.
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
"""File in each version's folder with the digest of the quantized version."""
_KEPT = 2
"""Number of kept versions: the newest and the one before, which the shadow may be reading."""


def unquantized_root(root: Path) -> Path:
    """Return the folder of that log, given ``weights.root``."""
    return root / "unquantized"


def remove_unquantized(root: Path) -> None:
    """Remove the unquantized log that an earlier service with a shadow left below ``weights.root``."""
    folder = unquantized_root(root)
    if folder.exists():
        logger.info("shadow.share is 0: removing %s", folder)
        shutil.rmtree(folder, ignore_errors=True)


class UnquantizedCopy:
    """The copy of one staged version: stores each tensor before it is quantized."""

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
        """Copy the tensors and yield them unchanged. Raises QuantizationError for NaN or infinity, like the conversion
        itself."""
        for name, tensor in tensors:
            if self._sound:
                self._take(name, tensor)
            yield name, tensor

    def renumber(self, version: int) -> None:
        """Change the version number."""
        folder = self._log.staging(version)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            self._folder.rename(folder)
        except OSError as error:
            self._lost(error)
        else:
            self._version, self._folder = version, folder

    def commit(self, digest: str) -> None:
        """Commit this copy after its quantized version was committed under that digest, and drop old ones."""
        try:
            if self._sound:
                recipe, tensors = Recipe(weights="none"), self._writer.finish()
                manifest = Manifest(
                    version=self._version, fingerprint=self._fingerprint, recipe=recipe, tensors=tensors
                )
                write_sealed(self._folder / _TWIN_FILE, digest)
                self._log.commit(manifest, "wait")  # the shadow finishes scoring with the previous version
            for version in self._log.versions()[:-_KEPT]:
                self._log.drop(version)
        except (OSError, LogCorrupt) as error:
            self._lost(error)

    def close(self) -> None:
        """Close the files."""
        self._writer.close()

    def remove_files(self) -> None:
        """Remove the files, unless they are committed."""
        self._writer.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        if is_codes(tensor):  # only in a broadcast, whose tensors are not all announced at its beginning
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
    """Keeps the newest versions unquantized; only the ingest writes it."""

    def __init__(self, root: Path, model: ServedModel) -> None:
        """``root``: ``weights.root`` on this node."""
        self._log, self._model = WeightLog(unquantized_root(root)), model
        self._told = False

    def recover(self, quantized: WeightLog) -> None:
        """Remove unfinished copies of an earlier ingest, and copies whose version in the log ``quantized`` is now
        another one."""
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
        if version not in quantized.versions():  # dropped since, so no new rollout can be sampled from it
            return True
        return read_sealed(self._log.folder(version) / _TWIN_FILE) == quantized.manifest(version).digest

    def roll_back(self, source: int, version: int, digest: str) -> None:
        """Commit the copy of a kept version again under a rollback's number and digest, if the copy still exists."""
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
        """Begin a copy of a version with these tensors; None if they are codes, or the disk has no room."""
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
