"""The configuration of the service: the content of ``args:`` in a deployment YAML."""

from rollout_service.config.engine import EngineConfig, KVCacheConfig, KVCalibrationConfig, QuantConfig
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
    "AuthConfig",
    "ChatConfig",
    "EngineConfig",
    "KVCacheConfig",
    "KVCalibrationConfig",
    "ModelConfig",
    "MonitorConfig",
    "QuantConfig",
    "ScalingConfig",
    "ServiceConfig",
    "WeightsConfig",
]
