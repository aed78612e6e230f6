"""scikit-learn's handwritten digits as files, for whoever trains on them here."""

from __future__ import annotations

from pathlib import Path


def write_digits(folder: str | Path) -> dict[str, str]:
    """Write `train.npz` and `eval.npz` into a folder, and tell where they are.

    Each appears whole, with the same bytes every time: so they are uploaded to the hosts once.
    """
    import numpy as np
    from sklearn.datasets import load_digits

    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(seed=0).permutation(len(digits))
    paths = {}
    for name, rows in {"train": order[:1437], "eval": order[1437:]}.items():
        path = folder / f"{name}.npz"
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, x=images[rows].astype("uint8"), y=digits[rows].astype("uint8"))
        paths[name] = str(partial.replace(path))
    return paths
