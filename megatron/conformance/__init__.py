"""What every encoding must keep: checks that `tools/check_encoding.py` and the tests share."""
