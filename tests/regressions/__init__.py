"""The bug museum: bugs that other trainers shipped, each with tests that keep it out of this one."""
