"""The 49 rows of the API through five clients, and three public harnesses, as `make clients` runs them.

    __main__.py       one real server, each client's rows, the snippets of docs/clients.md, its tables
    report.py         the outcomes of the rows, as a table
    snippets.py       the code blocks of docs/clients.md, run verbatim
    asked.py .mjs     questions and checks shared by the clients of a language
    with_*.py .mjs    the rows through a client, or a harness, each in a separate environment
    harnesses.py      the harnesses against a server, and our own scores on the same items
    lessons.py        the answers that the model under test first memorizes
    agreement.py      our scores and theirs, item by item, with reasons for differences; the report
    *.jsonl           items for lm-evaluation-harness and EvalPlus; bfcl-eval includes its own
    *.txt             the packages in each environment, with versions

The rows of openai's Python client are tests/test_clients.py and tests/test_clients_tools.py, which `make test` also
runs; the other clients have the same rows with the same numbers.
"""
