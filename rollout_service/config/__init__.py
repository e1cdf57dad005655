"""The configuration of the service: the content of ``args:`` in a deployment YAML."""

from rollout_service.config.engine import AdaptersConfig, EngineConfig, KVCacheConfig, QuantConfig
from rollout_service.config.service import (
    AuthConfig,
    ChatConfig,
    ModelConfig,
    MonitorConfig,
    ScalingConfig,
    ServiceConfig,
    WeightsConfig,
)

__all__ = [
    "AdaptersConfig",
    "AuthConfig",
    "ChatConfig",
    "EngineConfig",
    "KVCacheConfig",
    "ModelConfig",
    "MonitorConfig",
    "QuantConfig",
    "ScalingConfig",
    "ServiceConfig",
    "WeightsConfig",
]
