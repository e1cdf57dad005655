"""Checks that a log belongs to this service: same model, same commit of the model, same quantization."""

import msgspec

from rollout_service.config import QuantConfig, ServiceConfig
from rollout_service.errors import LogCorrupt
from rollout_service.model.quant_plan import QuantPlan
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.weight_log import Head
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest, Recipe


def recipe_of(quant: QuantConfig, plan: QuantPlan) -> Recipe:
    """Return the quantization recipe of versions."""
    recipe = Recipe(weights=quant.weights, scales=quant.scales, not_converted=plan.not_converted)
    return recipe if plan.form.in_blocks else msgspec.structs.replace(recipe, block=None)


def own_newest(
    log: WeightLog, model: ServedModel, recipe: Recipe, config: ServiceConfig
) -> tuple[Head, Manifest] | None:
    """Return the newest version; None for an empty log. Raises LogCorrupt for a damaged log, or one of another
    service."""
    head = log.head()
    if head is None:
        return None
    manifest = log.manifest(head.version)
    if (begun_with := model.other_revision(manifest.fingerprint)) is not None:
        raise LogCorrupt(f"the log at {log.root} was begun with {begun_with}, or name another weights.root")
    if manifest.fingerprint != model.fingerprint or manifest.recipe != recipe:
        raise LogCorrupt(
            f"the log at {log.root} holds version {head.version} of another model or quantization than "
            f"{config.model.path} with quant={config.quant.model_dump()}: name another weights.root"
        )
    return head, manifest
