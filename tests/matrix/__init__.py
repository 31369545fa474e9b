"""The 49 rows of the API through five clients, and three public harnesses, as `make clients` runs them.

    __main__.py       one real server, each client's rows, the snippets of docs/clients.md, its tables
    report.py         what the rows came to, as a table
    snippets.py       the code blocks of docs/clients.md, run as they stand
    asked.py .mjs     questions and checks that the clients of a language share
    with_*.py .mjs    a client's rows, or a harness, through its own API, in its own environment
    harnesses.py      the harnesses against a server, and our own numbers of the same items
    lessons.py        what the model under test learns by heart before that
    agreement.py      our numbers and theirs item by item, the reasons, the report
    *.jsonl           items of lm-evaluation-harness and EvalPlus; bfcl-eval brings its own
    *.txt             what stands in each environment, by number

The rows of openai's Python client are tests/test_clients.py and tests/test_clients_tools.py, which `make test` runs
too; the others say the same with the same numbers.
"""
