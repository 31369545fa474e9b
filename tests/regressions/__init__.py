"""The bug museum: faults that other trainers shipped, each with the test that keeps it out of here."""
