"""The check's Prometheus runs with the shipped configuration, and says so when there is none."""

import json
from pathlib import Path

import pytest
import yaml

from dashboards.check.prometheus import PrometheusUnavailable, configured, found_or_fetched
from dashboards.check.queries import FOLDER


def test_only_targets_and_intervals_of_the_shipped_file_change(tmp_path: Path) -> None:
    shipped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    path = configured(FOLDER / "prometheus.yml", tmp_path, "127.0.0.1:1", ["10.0.0.1:2", "10.0.0.2:3"], 1)
    made = yaml.safe_load(path.read_text())
    service, ray = made["scrape_configs"]
    assert service["static_configs"] == [{"targets": ["127.0.0.1:1"]}]
    (discovery,) = ray["file_sd_configs"][0]["files"]
    assert json.loads(Path(discovery).read_text())[0]["targets"] == ["10.0.0.1:2", "10.0.0.2:3"]
    assert made["global"] == {"scrape_interval": "1s", "evaluation_interval": "1s"}
    assert [Path(file).name for file in made["rule_files"]] == shipped["rule_files"]
    before = shipped["scrape_configs"]
    service["static_configs"] = before[0]["static_configs"]
    ray["file_sd_configs"][0]["files"] = before[1]["file_sd_configs"][0]["files"]
    made["global"], made["rule_files"] = shipped["global"], shipped["rule_files"]
    assert made == shipped


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_what_apt_says_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "apt-get", "echo E: Unable to locate package >&2; exit 100")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PrometheusUnavailable, match="Unable to locate package\nrun `apt-get update` as root"):
        found_or_fetched(tmp_path / "tools", lambda _: None)
