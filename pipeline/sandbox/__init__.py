"""Runs untrusted, model-generated code and decides whether it is correct.

    judge.py     programs and tests -> verdicts; keeps the expected values, runs no code
    pool.py      candidates -> jobs; applies a candidate's limits across all its children
    servers.py   servers on this machine;  remote.py, service.py  servers on another machine, over HTTP
    jail.py      one server: watcher, zygote, children. Its docstring lists what is guaranteed and what is not

Trusted: the trainer, and whoever starts the servers. Not trusted: a candidate and everything it sends, the tests and
sources that a client of the service posts, and user-supplied data rows.
"""
