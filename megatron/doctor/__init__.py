"""Whether this machine can run a training: findings, each with what to do.

The doctor itself needs the standard library alone. What needs torch is tried in a process of its
own (`probe`), so that a broken installation or a driver that hangs is a finding too.
"""
