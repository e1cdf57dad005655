"""The part of SGLang's HTTP API that trainers use: slime, and AReaL's SGLang backend.

Bodies and replies follow sglang 0.5.23 (``srt/entrypoints/http_server.py``, ``srt/managers/io_struct.py``). These
trainers label each segment of a completion with the version that they believe was served. A pause or an update
therefore returns aborted completions, and never continues them on another replica.
"""
