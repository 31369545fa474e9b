"""The 49 rows of the API through five clients, as `make clients` runs them.

    __main__.py       one real server, each client's rows, the snippets of docs/clients.md, its table
    report.py         what the rows came to, as a table
    snippets.py       the code blocks of docs/clients.md, run as they stand
    asked.py .mjs     questions and checks that the clients of a language share
    with_*.py .mjs    a client's rows, through its own API, in its own environment

The rows of openai's Python client are tests/test_clients.py and tests/test_clients_tools.py, which `make test` runs
too; the others say the same with the same numbers.
"""
