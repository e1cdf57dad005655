"""The engine replicas as a fleet.

    queue.py            where a rollout waits until a replica has room
    routing.py          chooses the replica
    dispatch.py         sends the rollout, retries it and continues it on other replicas
    progress.py         polls the tokens of running rollouts
    coordinator.py      state and commands of all replicas
    autoscaling.py      the number of replicas

``coordinator.py`` runs in the ingest, ``autoscaling.py`` in Serve's controller, the others in each gateway.
"""
