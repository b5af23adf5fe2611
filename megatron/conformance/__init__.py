"""What every encoding must keep: one set of checks for tools/check_encoding.py and the tests."""
