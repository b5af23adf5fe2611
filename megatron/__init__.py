"""GPT-NeoX-style pretraining for research on positional encodings and length extrapolation."""

import os
from pkgutil import extend_path

# Beside ours there may be megatron.core, of a package or a clone whose folder has no __init__.py.
__path__ = extend_path(__path__, __name__)

# Threads that wait for each other sleep instead of spinning. If other programs run, a spinning
# thread blocks the core that its partner needs: steps took 30 times as long (docs/performance.md).
# OpenMP reads the variable when torch is loaded, so we set it before; the user's value is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
