"""Untrusted code: runs what a model wrote, and says whether it is right.

    judge.py     programs and tests -> verdicts; keeps the expected values, runs no code
    pool.py      candidates -> jobs, with limits over all their children
    servers.py   the servers of this machine;  remote.py, service.py  those of another one, over HTTP
    jail.py      one server: watcher, zygote, children. Its docstring says what is promised and what is not

Who is trusted: the trainer, and whoever starts the servers. Who is not: a candidate, whatever it sends, the tests and
sources that a client of the service posts, and the rows of brought data.
"""
