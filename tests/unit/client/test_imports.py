import subprocess
import sys
from pathlib import Path

import rollout_service.client

ROOT = Path(rollout_service.__file__).parents[1]


def test_generating_needs_no_torch_and_quantizing_no_engine():
    code = (
        "import asyncio, sys, httpx\n"
        "from rollout_service.client import RolloutClient\n"
        "ok = httpx.MockTransport(lambda _: httpx.Response(200, json={'request_id': 'a', 'choices': [\n"
        "    {'index': 0, 'token_ids': [1], 'logprobs': [-1],\n"
        "     'finish_reason': 'stop', 'weight_versions': [{'version': '0', 'start': 0, 'end': 1}]}],\n"
        "    'replica_id': 'r'}))\n"
        "print(asyncio.run(RolloutClient('http://a', transport=ok).generate([2])).completions[0].token_ids)\n"
        "print(sorted({'torch', 'vllm', 'ray'} & sys.modules.keys()))\n"
        "import rollout_service.model.convert as convert\n"
        "from rollout_service.protocol.upload import TrainerRecipe\n"
        "convert.Converter(TrainerRecipe(weights='none'))\n"
        "print('torch' in sys.modules, sorted({'ray', 'transformers', 'vllm', 'fastapi'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "(1,)\n[]\nTrue []\n"
