"""Lines of a run of ``benchmarks.training.tis_ablation``."""

STEP = {
    "reward": 0.5,
    "k3": 0.01,
    "probability_error": 0.001,
    "ess": 0.98,
    "clipped": 0.002,
    "tokens": 400.0,
    "cut_off": 0.0,
    "grad_norm": 0.5,
    "suspect": 0.0,
    "step_s": 2.0,
    "rollout_s": 1.5,
    "update_s": 0.25,
}
END = {"trainer_accuracy": 0.9, "service_accuracy": 0.8, "wall_s": 12.0, "ended": "all steps were made"}
