"""What is committed is what the generator makes, whole, in Grafana's model."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.check.schema import round_trips
from dashboards.generate import FOLDER, generated

BOARDS = ("rollout.json", "mismatch.json")


def board(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return loaded


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


def test_the_committed_files_are_what_the_generator_makes() -> None:
    assert {name: (FOLDER / name).read_text() for name in generated()} == generated()


def test_grafanas_model_gives_each_dashboard_back_as_it_is() -> None:
    assert round_trips() == ["rollout", "mismatch"]


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_has_a_unit_a_legend_and_a_description(name: str) -> None:
    for panel in panels(name):
        assert panel["type"] == "timeseries" and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert len(panel["description"].split()) >= 12 and panel["description"].endswith("."), panel["title"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"]), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_unique_titles_and_ids_and_do_not_overlap(name: str) -> None:
    titles = [panel["title"] for panel in panels(name)]
    ids = [panel["id"] for panel in board(name)["panels"]]
    assert len(set(titles)) == len(titles) and len(set(ids)) == len(ids)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in board(name)["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_picks_datasource_service_app_and_replica(name: str) -> None:
    variables = {variable["name"]: variable for variable in board(name)["templating"]["list"]}
    assert list(variables) == ["datasource", "service", "application", "replica"]
    assert variables["datasource"]["query"] == "prometheus"
    assert all(variables[each]["includeAll"] for each in ("service", "application", "replica"))


def test_the_dashboards_link_to_each_other() -> None:
    uids = {board(name)["uid"] for name in BOARDS}
    assert {link["url"] for name in BOARDS for link in board(name)["links"]} == {f"/d/{uid}" for uid in uids}


def test_what_compose_mounts_and_prometheus_loads_is_there() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    mounts = [mount.split(":")[0] for service in services.values() for mount in service["volumes"]]
    assert [mount for mount in mounts if mount.startswith("./") and not (FOLDER / mount).exists()] == []
    rules = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["rule_files"]
    mounted = {Path(mount).name for mount in services["prometheus"]["volumes"][0:2] for mount in [mount.split(":")[1]]}
    assert set(rules) | {"prometheus.yml"} == mounted


def test_grafana_is_shown_the_prometheus_that_compose_starts() -> None:
    command = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["prometheus"]["command"]
    (source,) = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in command
    shipped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == shipped["global"]["scrape_interval"]
