"""One figure for each benchmark, out of its result: what the table of README.md shows."""

import statistics
from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]


def throughput(result: Json) -> str:
    """Of ``rollout.throughput``: the lowest of all models and modes, or what FP8 brings where no service was run."""
    ratios = result["ratios"]
    if "http_to_bare" not in ratios:
        to_bf16 = min(ratio for name, ratio in ratios.items() if name.startswith("fp8kv_to_bf16"))
        return f"FP8 with an FP8 KV cache makes {to_bf16:.2f} times the tokens/s of BF16 in 80 GB"
    return f"over HTTP {ratios['http_to_bare']:.2f} of the bare engine's tokens/s, or more"


def memory(result: Json) -> str:
    """Of ``rollout.memory``: the first model with ``engine.staging: auto``."""
    case = one(result["cases"], staging="auto")
    return (
        f"{case['model']} in {case['gpu_gb']:.0f} GB, staged on the {case['staged']}: {case['kv_tokens'] / 1000:.0f} k "
        f"tokens of KV cache, {case['tokens_per_s']:.0f} tokens/s, closed for {max(case['closed_s']):.2f} s"
    )


def overhead(result: Json) -> str:
    """Of ``rollout.overhead``."""
    return f"over HTTP {result['ratio']:.2f} of the bare engine's tokens/s"


def reply_json(result: Json) -> str:
    """Of ``rollout.reply_json``."""
    by_token, flat = (one(result["cases"], form=form)["gateway_ms"] for form in ("object a token", "flat_logprobs"))
    return (
        f"{flat:.1f} ms in the gateway for {result['n']} × {result['tokens']} tokens; an object a token {by_token:.1f}"
    )


def chat(result: Json) -> str:
    """Of ``rollout.chat``."""
    native, plain, session = (one(result["cases"], side=side) for side in ("native", "chat", "session"))
    return (
        f"{plain['requests_to_native']:.2f} of the native route's small requests a second by chat, "
        f"{session['requests_to_native']:.2f} in a session; {plain['cpu_ms']['gateway']:.1f} ms of the gateway's CPU a "
        f"chat, native {native['cpu_ms']['gateway']:.1f}"
    )


def streams(result: Json) -> str:
    """Of ``rollout.streams``."""
    return (
        f"{result['kills']} kills under {result['rollouts']} rollouts: at most {result['tokens_lost_max_s']:.2f} s of "
        f"work lost, {result['stale_tokens']} stale tokens, {result['lost_requests']} lost requests"
    )


def length_bias(result: Json) -> str:
    """Of ``rollout.length_bias``."""
    mean = {case["case"]: case["mean_tokens"] for case in result["cases"]}
    return (
        f"a mean of {mean['undisturbed']:.0f} tokens undisturbed, {mean['continued']:.0f} if what is aborted goes on, "
        f"{mean['restarted']:.0f} if it starts anew"
    )


def engine_update(result: Json) -> str:
    """Of ``update.engine``."""
    ours, native = (one(result["cases"], way=way) for way in ("device", "native"))
    return f"{ours['model']} loaded in {milliseconds(ours['load_s'])} ms, by vLLM in {milliseconds(native['load_s'])}"


def live_update(result: Json) -> str:
    """Of ``update.live``."""
    cases = result["cases"]
    closed = [seconds for case in cases for seconds in case["closed_s"]]
    live = [statistics.median(case["all_live_s"]) for case in cases]
    closed_ms = f"{1e3 * min(closed):.0f} to {1e3 * max(closed):.0f} ms"
    return (
        f"{cases[0]['model']} closed for {closed_ms}, served {min(live):.1f} to {max(live):.1f} s after the last byte"
    )


def shipped(result: Json) -> str:
    """Of ``update.shipped``."""
    pushes = [case for case in result["cases"] if "median_push_s" in case]
    seconds = [f"{case['transport']} {case['median_push_s']:.2f} s" for case in pushes if case["replicas"] == 1]
    return f"{pushes[0]['model']} as shipped: {', '.join(seconds)}"


def trained(result: Json) -> str:
    """Of ``trainers.trl`` and ``trainers.verl``: this service beside the trainer's own engine in BF16."""
    ours, own = (one(result["cases"], side=side) for side in ("ours", "own"))
    name, engine = {"trl": ("TRL", "server"), "verl": ("verl", "engine")}[ours["trainer"]]
    return (
        f"{name}'s GRPO, {ours['model']}: a step in {ours['median_step_s']:.2f} s, with its own {engine} "
        f"{own['median_step_s']:.2f}; weights served after {ours['median_sync_s']:.2f} s, {own['median_sync_s']:.2f}"
    )


def sleeping(result: Json) -> str:
    """Of ``update.sleep``: the slowest round of the first case."""
    case = result["cases"][0]
    share = 1 - max(case["asleep_gib"]) / case["awake_gib"]
    return (
        f"{case['model']} asleep in {max(case['sleep_s']):.1f} s with {share:.1%} of its GPU memory given back, awake "
        f"with a new version in {max(case['wake_to_new_s']):.1f} s"
    )


def delta(result: Json) -> str:
    """Of ``update.delta``: after one step and after several, and its speed."""
    shares = {new - old: case["encoded_share"] for case in result["cases"] for old, new in [case["steps"]] if old}
    sent = " and ".join(f"{share:.1%} after {steps}" for steps, share in sorted(shares.items()))
    times = {name: statistics.median(result["times"][f"{name}_s"]) for name in ("copy", "compare", "apply")}
    ratios = [f"{times['copy'] / times[name]:.2f}" for name in ("compare", "apply")]
    return f"of all bytes {sent} steps of AdamW; found at {ratios[0]}, applied at {ratios[1]} of a copy's speed"


def attention(result: Json) -> str:
    """Of ``kernels.attention``: the fastest page of each cache."""
    first = result["cases"][0]["model"]
    bf16, fp8 = (
        min(statistics.median(case["ms"]) for case in matching(result["cases"], model=first, kernel="flash", kv=kv))
        for kv in ("bf16", "fp8")
    )
    return f"FlashAttention {bf16 / fp8:.2f} times as fast with an FP8 cache ({first})"


def group_attention(result: Json) -> str:
    """Of ``group_attention``: the case that gained most and the one that gained least."""
    cases = sorted(result["cases"], key=lambda case: case["ratio"])
    least, most = (f"{case['ratio']:.2f} ({_work(case)})" for case in (cases[0], cases[-1]))
    return f"tokens/s of an engine that reads a group's prompt once, to FlashAttention's: {least} to {most}"


def fp8_decode(result: Json) -> str:
    """Of ``kernels.fp8_decode``: the fastest variant."""
    best = max(result["cases"], key=lambda case: case["tb_per_s"])
    return (
        f"an FP8 cache read at {best['tb_per_s']:.2f} TB/s ({best['variant']}), by FlashAttention 3 at "
        f"{best['flash_attention_tb_per_s']:.2f}"
    )


def layers(result: Json) -> str:
    """Of ``mismatch.layers``: the step of each engine and trainer that is furthest from the engine's."""
    found: dict[tuple[str, str], Json] = {}
    for case in result["cases"]:
        trainer = (case["engine"], case["products"])
        if case["step"].startswith(("attention ", "attention,")):  # another way than the trainer's
            continue
        if trainer not in found or case["step_unlike"] > found[trainer]["step_unlike"]:
            found[trainer] = case
    return "; ".join(
        f"{', '.join(filter(None, trainer))}: at most {case['step_unlike']:.1e} of a step's numbers unequal, in "
        f"{case['step']}"
        for trainer, case in found.items()
    )


def _work(case: Json) -> str:
    system = f"{case['system_tokens']} + " if case["system_tokens"] else ""
    sizes = f"{case['groups']} × {case['n']} × ({system}{case['prompt_tokens']} + {case['output_tokens']})"
    return f"{case['model']}, {case['mode']}, {sizes}"


def grouped_kernels(result: Json) -> str:
    """Of ``kernels.group_attention``: the fastest and the slowest, and what the grouping costs."""
    ratios, once = ([case[name] for case in result["cases"]] for name in ("ratio", "grouping_us"))
    return (
        f"attention alone {min(ratios):.2f} to {max(ratios):.2f} times as fast; the grouping takes up to "
        f"{max(once):.0f} µs a step"
    )


def linear(result: Json) -> str:
    """Of ``kernels.linear``."""
    seconds: dict[str, dict[tuple[Any, ...], float]] = {"cutlass": {}, "deep_gemm": {}}
    for case in result["cases"]:
        if case["kernel"] in seconds and case["seconds"]:
            shape = (case["model"], case["layer"], case["tokens"])
            seconds[case["kernel"]][shape] = statistics.median(case["seconds"])
    gains = [seconds["cutlass"][shape] / seconds["deep_gemm"][shape] for shape in seconds["deep_gemm"]]
    return f"DeepGEMM {min(gains):.1f} to {max(gains):.1f} times as fast as CUTLASS"


def decode_profile(result: Json) -> str:
    """Of ``kernels.decode_profile``."""
    model = result["cases"][0]["model"]
    steps = [f"{case['mode']} {case['step_ms']:.1f} ms" for case in matching(result["cases"], model=model)]
    return f"a decode step of {model}: {', '.join(steps)}"


def decode_step(result: Json) -> str:
    """Of ``rollout.decode_step``: the default's first case, and the side that is fastest against its own default."""
    cases = result["cases"]
    case = matching(cases, side="default")[0]
    best = min((each for each in cases if each["step_ratio"] is not None), key=lambda each: each["step_ratio"])
    share = f"{case['step_ms']:.1f} ms a step, its roofline {case['of_roofline']:.0%} of that"
    return f"{case['model']}, {case['case']}: {share}; {best['side']}: {best['step_ratio']:.3f} of the default's step"


def quantizer(result: Json) -> str:
    """Of ``quantizer``: the last, which is the largest, of its cases."""
    last = matching(result["cases"], kernel="ours")[-1]
    return f"{last['name']} at {last['ratio_to_copy']:.0%} of a copy's speed"


def logprobs(result: Json) -> str:
    """Of ``mismatch.logprobs``: of these engines, those that were measured. Raises ValueError if none was."""
    engines = ("bf16", "fp8_block", "fp8_block, fp8 kv", "fp8_block, compiled")
    measured = {case["engine"]: case["k3"] for case in matching(result["cases"], model="qwen3")}
    k3 = "; ".join(f"{engine} {measured[engine]:.1e}" for engine in engines if engine in measured)
    if not k3:
        raise ValueError(f"no case of qwen3 has one of the engines {engines}")
    return f"k3 of qwen3 against fp32: {k3}"


def kv_scales(result: Json) -> str:
    """Of ``mismatch.kv_scales``."""
    unit, service = (one(result["cases"], model="qwen2, loud keys", scales=scales) for scales in ("unit", "service"))
    return f"k3 of loud keys {service['k3']:.2g} with measured scales, {unit['k3']:.2g} with scales of 1"


def tis_ablation(result: Json) -> str:
    """Of ``training.tis_ablation``."""
    tis, plain = (result["summary"][arm]["final_reward"]["mean"] for arm in ("fp8_tis", "fp8"))
    return f"final reward in FP8 {tis:.3f} with TIS, {plain:.3f} without"


def demo_fake_quant(result: Json) -> str:
    """Of ``training.demo_fake_quant``."""
    with_it, without = (result["runs"][name] for name in ("fake_quant", "plain"))
    reward = f"reward {with_it['reward_first']:.2f} → {with_it['reward_last']:.2f}"
    return f"{reward} under fake_quant, mean k3 {with_it['k3_mean']:.1e} instead of {without['k3_mean']:.1e}"


def demo(result: Json) -> str:
    """Of ``training.demo``."""
    summary = result["summary"]
    return f"reward {summary['reward_first']:.2f} → {summary['reward_last']:.2f} in {summary['steps']} steps"


def autoscaling(result: Json) -> str:
    """Of ``autoscaling``."""
    running = [sample["running"] for sample in result["samples"]]
    replicas = f"{running[0]} → {max(running)} → {running[-1]} replicas"
    return f"{replicas}, {sum(result['answered'].values())} rollouts, {result['stale_rollouts']} stale"


def faults(result: Json) -> str:
    """Of ``faults``."""
    cases = [case for case in result["cases"] if not case["skipped"]]
    lost = ("stale_tokens", "lost_requests", "lost_versions")
    clean = sum(case["survived"] and not any(case[count] for count in lost) for case in cases)
    return f"{clean} of {len(cases)} faults survived with nothing stale or lost"


def soak(result: Json) -> str:
    """Of ``soak``: all seeds."""
    names = ("kills", "rollouts", "stale_tokens", "lost_requests", "lost_versions")
    kills, rollouts, stale, requests, versions = (sum(case[name] for case in result["cases"]) for name in names)
    lost = f"{stale} stale tokens, {requests} lost requests, {versions} lost versions"
    return f"{kills} signals, {rollouts} rollouts: {lost}"


def clients(result: Json) -> str:
    """Of ``clients``: the table itself is in the README."""
    passed = sum(case["passed"] for case in result["cases"])
    return f"{passed} of {len(result['cases'])} clients pass {sum(case['tests'] for case in result['cases'])} tests"


def models(result: Json) -> str:
    """Of ``models``: the table itself is docs/models.md."""
    cases = result["cases"]
    built = [case for case in cases if case["source"]]
    served = [case for case in built if case["difference"] is not None and not case["failure"]]
    most = sum(case["fp8"] > 0.9 for case in built)
    return (
        f"of {len(cases)} families outside the table vLLM builds {len(built)}: {most} with over 90% of their "
        f"layers in FP8; {len(served)} were served by an engine"
    )


def published(result: Json) -> str:
    """Of ``published``: the table itself is in docs/models.md."""
    cases = result["cases"]
    sizes = sorted({way["gpus"] for case in cases for way in case["ways"]})
    counts = [
        sum(any(way["gpus"] == size and way["fp8"] > 0.9 for way in case["ways"]) for case in cases) for size in sizes
    ]
    said = ", ".join(f"{count} by engines of {size}" for count, size in zip(counts, sizes, strict=True))
    return f"of {len(cases)} published models over 90% of the layers become FP8: {said} GPUs"


def gpu_tests(result: Json) -> str:
    """Of ``gpu_tests``."""
    return f"{result['passed']} tests passed, {result['failed']} failed"


def matching(cases: Iterable[Json], **fields: object) -> list[Json]:
    """Those with these values. Raises ValueError if there is none."""
    found = [case for case in cases if all(case[name] == value for name, value in fields.items())]
    if not found:
        raise ValueError(f"no case has {fields}")
    return found


def one(cases: Iterable[Json], **fields: object) -> Json:
    """The first of them. Raises what ``matching`` raises."""
    return matching(cases, **fields)[0]


def milliseconds(seconds: list[float]) -> str:
    """The median."""
    return f"{1e3 * statistics.median(seconds):.0f}"
