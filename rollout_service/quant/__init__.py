"""Quantization of weights to FP8 or INT8.

    quantizer.py        chooses an implementation by device
    blockwise.py        128×128 blocks: ``quantize_blockwise`` is the specification, in plain torch
    cuda.py, cpu.py     the same bytes from Triton and numba
    formats.py          names, dtypes and shapes of codes and scales; the specification of channels
    digests.py, soundness.py, deferred_checks.py   checks on a GPU
    fake_quant.py, engine_roundings.py, forwards.py   let a trainer compute as an engine does

The ingest and trainers call ``Quantizer.quantize``.
"""
