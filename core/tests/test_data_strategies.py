"""A plugin's way to divide data, chosen by its registered name."""

from __future__ import annotations

import json
import sys
import warnings

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from drivetrain._plugins.process import _process_registry
from drivetrain.data import DataLoaderConfiguration, prepare_data_loader
from drivetrain.errors import ConfigurationError, DrivetrainError, PluginNotFoundError
from drivetrain.testing.distributions import write_plugin

ENTRY = """
    from drivetrain.hookspecs import hookimpl
    from drivetrain.specs import DataShardingSpec

    DRIVETRAIN_API = 1

    @hookimpl
    def drivetrain_register_data_shardings():
        return [DataShardingSpec(name="from-the-back", summary="Batches from the last one on", target="back_code:FromTheBack")]
"""

CODE = """
    from drivetrain.interfaces import DataSharding

    class FromTheBack(DataSharding):
        def shard(self, batches, rank, world_size):
            assert self.spec.name == "from-the-back"
            return iter(list(batches)[::-1][rank::world_size])
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The plugin, as if pip had installed it."""
    write_plugin(tmp_path, "back", ENTRY, files={"back_code.py": CODE})
    monkeypatch.syspath_prepend(str(tmp_path))
    _process_registry.cache_clear()
    yield tmp_path
    _process_registry.cache_clear()
    sys.modules.pop("back_code", None)


def prepare(make, world, **settings):
    config = DataLoaderConfiguration(data_seed=5, **settings)
    return [prepare_data_loader(make(), num_processes=world, process_index=r, config=config) for r in range(world)]


def rows(loader, count=None):
    rank = loader._drivetrain.context.ranks.index
    result = []
    for batch in loader:
        result.append(batch.tolist()[: loader.batch.round.new[rank]])
        if len(result) == count:
            break
    return result


@pytest.mark.parametrize("even", [True, False, "repeat"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_go_where_the_plugin_says(installed, even, shuffle):
    def make():
        return DataLoader(range(23), batch_size=3, shuffle=shuffle)

    loaders = prepare(make, 2, strategy="from-the-back", even_batches=even)
    ranks = [rows(loader) for loader in loaders]
    assert sorted(row for rank in ranks for batch in rank for row in batch) == list(range(23))
    assert [len(loader) for loader in loaders] == [len(rank) for rank in ranks]
    if not shuffle:
        assert ranks[0][0] == [21, 22] and ranks[1][0] == [18, 19, 20] and ranks[0][1] == [15, 16, 17]
    again = prepare(make, 2, strategy="from-the-back", even_batches=even)
    assert [rows(loader) for loader in again] == ranks
    assert loaders[0].state_dict()["layout"]["strategy"] == "from-the-back"


def test_positions_survive_a_resize_and_need_the_plugin(installed):
    def make():
        return DataLoader(range(23), batch_size=3)

    before = prepare(make, 2, strategy="from-the-back")
    seen = [row for loader in before for batch in rows(loader, 2) for row in batch]
    state = json.loads(json.dumps(before[0].state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for loader in prepare(make, 3, strategy="from-the-back"):
            loader.load_state_dict(state)
            seen += [row for batch in rows(loader) for row in batch]
    assert sorted(seen) == list(range(23))
    other = prepare(make, 2)[0]
    other.load_state_dict(state)
    with pytest.raises(ConfigurationError, match="data sharding 'from-the-back', and now it is 'interleaved'"):
        list(other)


def test_on_live_ranks_and_by_dispatching(installed, workers):
    def run(folder, dispatch):
        sys.path.insert(0, folder)
        _process_registry.cache_clear()
        try:
            config = DataLoaderConfiguration(strategy="from-the-back", dispatch_batches=dispatch)
            loader = prepare_data_loader(
                DataLoader(range(12), batch_size=2), num_processes=2, process_index=dist.get_rank(), config=config
            )
            return [batch.tolist() for batch in loader]
        finally:
            sys.path.remove(folder)
            _process_registry.cache_clear()

    for dispatch in (False, True):
        a, b = workers(2).run(run, str(installed), dispatch)
        assert a == [[10, 11], [6, 7], [2, 3]] and b == [[8, 9], [4, 5], [0, 1]]


def test_a_name_that_nobody_offers_and_settings_that_contradict(installed):
    with pytest.raises(PluginNotFoundError, match="from-the-bak") as caught:
        prepare(lambda: DataLoader(range(3)), 2, strategy="from-the-bak")
    assert "from-the-back" in str(caught.value)
    with pytest.raises(DrivetrainError, match="split_batches"):
        list(prepare(lambda: DataLoader(range(8), batch_size=4), 2, strategy="from-the-back", split_batches=True)[0])
