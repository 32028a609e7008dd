"""A stream that each rank reads its own shard of has a state for each rank, and each gets its own back."""

import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import Accelerator, DataLoaderConfiguration


class Shards(IterableDataset):
    """Numbers in shards of different pace: its state is where it stands, and shards skip at different places."""

    def __init__(self, numbers):
        self.numbers, self.position = list(numbers), 0

    def shard(self, num_shards, index):
        return Shards(self.numbers[index::num_shards])

    @property
    def num_shards(self):
        return 2

    def __iter__(self):
        while self.position < len(self.numbers):
            self.position += 1
            yield torch.tensor(self.numbers[self.position - 1])
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "first": self.numbers[0]}

    def load_state_dict(self, state):
        assert state["first"] == self.numbers[0], "another rank's state"
        self.position = state["position"]


def read(folder, resume):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(DataLoader(Shards(range(20)), batch_size=2))
    if resume:
        accelerator.load_state(folder)
    seen = []
    for i, batch in enumerate(loader):
        seen += batch.tolist()
        if not resume and i == 1:
            accelerator.save_state(folder)
            break
    accelerator.end_training()
    return seen


def test_each_rank_goes_on_with_its_own_shard(ranks, tmp_path):
    before = ranks.run(read, tmp_path / "saved", resume=False)
    after = ranks.run(read, tmp_path / "saved", resume=True)
    for first, second in zip(before, after, strict=True):
        assert not set(first) & set(second)
    assert sorted(n for part in before + after for n in part) == list(range(20))
