"""Write the dashboards and alert rules anew: ``python -m dashboards.generate``."""

from pathlib import Path

from dashboards import alerts, mismatch, rollout, rollout_updates
from dashboards.panels import assembled

FOLDER = Path(__file__).parent
ROLLOUT, MISMATCH = "rollout-service", "rollout-mismatch"
"""The dashboards' uids."""


def generated() -> dict[str, str]:
    """File of this folder → its text."""
    rows = (
        rollout.THROUGHPUT,
        rollout.LATENCY,
        rollout.FLEET,
        rollout_updates.VERSIONS,
        rollout_updates.UPDATES,
        rollout_updates.UPLOADS,
        rollout_updates.AUTOSCALING,
    )
    return {
        "rollout.json": assembled(
            ROLLOUT, "Rollout service", "Throughput, latency, fleet, versions and updates.", rows, [MISMATCH]
        ),
        "mismatch.json": assembled(
            MISMATCH, "Rollout mismatch", "Rollout policy against trainer; docs/mismatch.md.", mismatch.ROWS, [ROLLOUT]
        ),
        "alerts.yml": alerts.rules(),
    }


def main() -> None:
    """Write all files."""
    for name, text in generated().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
