from __future__ import annotations

import numpy as np
import pytest

from moeflow.errors import DataError
from moeflow.plan.traces import draw_counts, drifting, load_trace, zipf


def test_zipf_shares():
    shares = zipf(64, 1.2, np.random.default_rng(0))
    assert shares.sum() == pytest.approx(1.0)
    assert shares.max() / shares.min() == pytest.approx(64**1.2)
    assert zipf(8, 0.0, np.random.default_rng(0)).tolist() == [0.125] * 8


def test_drift_changes_shares_slowly_and_without_end():
    walk = drifting(32, 1.0, 0.05, np.random.default_rng(0), leading=(3,))
    laws = [next(walk).copy() for _ in range(300)]
    assert laws[0].shape == (3, 32)
    assert np.allclose(np.stack(laws).sum(-1), 1.0)
    near, far = np.abs(laws[1] - laws[0]).sum(-1).mean(), np.abs(laws[-1] - laws[0]).sum(-1).mean()
    assert near < 0.1 < far


@pytest.mark.parametrize("ranks", [8, 5000])
def test_counts_follow_their_law(ranks):
    shares = zipf(32, 1.0, np.random.default_rng(0))
    counts = draw_counts(shares, ranks, 4096, np.random.default_rng(1))
    assert counts.shape == (ranks, 32)
    deviation = np.sqrt(4096 * shares * (1 - shares) / ranks)
    assert (np.abs(counts.mean(0) - 4096 * shares) < 5 * deviation + 0.5).all()
    if ranks == 5000:
        assert counts.std(0) == pytest.approx(np.sqrt(4096 * shares * (1 - shares)), rel=0.05)


def test_files_that_hold_no_trace(tmp_path):
    with pytest.raises(DataError, match="is no routing trace"):
        load_trace(tmp_path / "none.npz")
    path = tmp_path / "bad.npz"
    np.savez(path, counts=np.zeros((2, 3)), iteration=np.zeros(2))
    with pytest.raises(DataError, match="counts \\(2, 3\\)"):
        load_trace(path)
    np.savez(path, other=np.zeros(2))
    with pytest.raises(DataError, match="is no routing trace"):
        load_trace(path)
