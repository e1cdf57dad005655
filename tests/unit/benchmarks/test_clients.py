"""The table of docs/clients.md is what driving the service with them has found."""

import re

from benchmarks.clients.released import CLIENTS
from benchmarks.clients.table import PAGE
from benchmarks.common.paths import PROJECT

FOLDERS = {path.stem for path in (PROJECT / "requirements/clients").glob("*.txt")}


def test_every_set_of_pins_is_a_clients():
    assert {client.folder for client in CLIENTS if client.folder} == FOLDERS


def test_links_of_rows_lead_to_pages():
    links = [link for client in CLIENTS for link in re.findall(r"\]\((.*?)\)", client.linked)]
    assert links and all((PAGE.parent / link).is_file() for link in links)
