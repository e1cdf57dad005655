"""What is committed is what the generator makes, whole, in Grafana's model."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.check import plot
from dashboards.check.schema import round_trips
from dashboards.generate import FOLDER, generated

BOARDS = ("rollout.json", "mismatch.json")


def board(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return loaded


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


def test_the_committed_files_are_what_the_generator_makes():
    assert {name: (FOLDER / name).read_text() for name in generated()} == generated()


def test_grafanas_model_gives_each_dashboard_back_as_it_is():
    assert round_trips() == ["rollout", "mismatch"]


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_has_a_unit_a_legend_and_a_description(name):
    for panel in panels(name):
        assert panel["type"] == "timeseries" and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert len(panel["description"].split()) >= 12 and panel["description"].endswith("."), panel["title"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"]), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_what_compose_mounts_and_prometheus_loads_is_there():
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    mounts = [mount.split(":")[0] for service in services.values() for mount in service["volumes"]]
    assert [mount for mount in mounts if mount.startswith("./") and not (FOLDER / mount).exists()] == []
    rules = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["rule_files"]
    mounted = {Path(mount).name for mount in services["prometheus"]["volumes"][0:2] for mount in [mount.split(":")[1]]}
    assert set(rules) | {"prometheus.yml"} == mounted


def test_what_is_plotted_is_a_panel_with_a_filled_in_legend():
    titles = {(name.removesuffix(".json"), panel["title"]) for name in BOARDS for panel in panels(name)}
    assert {(board, title) for board, title, _ in plot.PANELS} <= titles
    assert set(plot.LOGARITHMIC) <= {title for _, title in titles}
    assert plot.legend("v{{version}} {{adapter}} {{replica}}", {"version": "3", "replica": "one"}) == "v3 one"
