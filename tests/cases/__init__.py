"""Programs that exercise the rules: one module a family, each with a list CASES."""
