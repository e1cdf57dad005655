"""SGLang's HTTP API, as far as trainers use it that drive an SGLang server: slime, and AReaL's SGLang backend.

Bodies and replies are those of sglang 0.5.23 (``srt/entrypoints/http_server.py``, ``srt/managers/io_struct.py``). Such
trainers label each piece of a completion with the version that they believe was served, so here a pause or an update
returns what it aborts, and never goes on with it elsewhere.
"""
