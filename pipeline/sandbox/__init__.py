"""Runs untrusted code, written by a model, and decides whether it is right.

    judge.py     programs and tests -> verdicts; keeps the expected values, runs no code
    pool.py      candidates -> jobs; applies a candidate's limits across all its children
    servers.py   the servers of this machine;  remote.py, service.py  those of another machine, over HTTP
    jail.py      one server: watcher, zygote, children. Its docstring lists what is promised and what is not

Trusted: the trainer, and whoever starts the servers. Not trusted: a candidate and everything it sends, the tests and
sources that a client of the service posts, and the rows of data that users bring.
"""
