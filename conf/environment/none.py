"""No environment: problems with hidden tests, answered in one turn."""
