"""The committed dashboards through Grafana's own model and back."""

import json

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.check.queries import DASHBOARDS, dashboard


def round_trips() -> list[str]:
    """Names of the dashboards. Raises ValueError for one that the model does not give back as it is."""
    register_default_plugins()
    for name in DASHBOARDS:
        shipped = dashboard(name)
        back = json.loads(json.dumps(Dashboard.from_json(shipped), cls=JSONEncoder))
        if back != shipped:
            differ = [key for key in shipped.keys() | back.keys() if shipped.get(key) != back.get(key)]
            raise ValueError(f"{name}.json is not what Grafana's model makes of it: {', '.join(sorted(differ))} differ")
    return list(DASHBOARDS)
