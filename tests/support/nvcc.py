"""A mark for tests of DeepGEMM."""

import pytest

from rollout_service.engine.hardware import has_nvcc

needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="DeepGEMM needs CUDA's compiler")
