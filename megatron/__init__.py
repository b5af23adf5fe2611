"""GPT-NeoX-style pretraining for research on positional encodings and length extrapolation."""

import os

# Threads that wait for each other sleep instead of spinning. Beside another program a spinning
# thread takes the core that its partner needs: two threads then took 8 times as long as with this.
# OpenMP reads the variable when torch is loaded, so it is set before that; the user's value stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
