"""All findings of one machine, in the order in which a reader mends them."""

import tempfile
from pathlib import Path

from megatron.doctor import devices, packages, places
from megatron.doctor.finding import Finding


def examined(save: Path, data: Path) -> list[Finding]:
    """What stops a run here, what slows it, and what is well.

    save: the folder for checkpoints; data: the one for token files; both need not exist
    """
    temporary = Path(tempfile.gettempdir())
    least = places.LEAST_RUN
    return [
        packages.python(),
        *packages.versions(packages.wanted()),
        *devices.judged(devices.probed()),
        places.memory(),
        places.shared_memory(),
        places.folder(save, "save", enough=places.RUN, least=least),
        places.folder(data, "data", enough=places.TEMPORARY, least=None),
        places.folder(temporary, "temporary", enough=places.TEMPORARY, least=least),
        *places.stale_locks(),
        places.loopback(),
    ]
