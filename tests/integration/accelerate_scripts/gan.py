"""A small GAN: two models, two optimizers, three backward passes per batch."""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build_models():
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return generator, discriminator


def make_dataset(size):
    rng = torch.Generator().manual_seed(13)
    angle = torch.rand(size, generator=rng) * 6.2832
    circle = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(size, 2, generator=rng)
    # The latent vectors are part of the data, so that runs with different numbers of processes can be compared.
    return TensorDataset(circle, torch.randn(size, 4, generator=rng))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=args.cpu)
    set_seed(123)
    netG, netD = build_models()
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    dataloader = DataLoader(make_dataset(256), batch_size=args.batch_size)
    netG, netD, optimizerG, optimizerD, dataloader = accelerator.prepare(netG, netD, optimizerG, optimizerD, dataloader)
    criterion = nn.BCEWithLogitsLoss()

    for _ in range(args.num_epochs):
        for real, latent in dataloader:
            ones = torch.ones(real.shape[0], 1, device=accelerator.device)
            zeros = torch.zeros_like(ones)

            # (1) the discriminator: once on real data, once on generated data
            netD.zero_grad()
            loss_real = criterion(netD(real), ones)
            accelerator.backward(loss_real)
            fake = netG(latent)
            loss_fake = criterion(netD(fake.detach()), zeros)
            accelerator.backward(loss_fake)
            optimizerD.step()

            # (2) the generator
            netG.zero_grad()
            loss_g = criterion(netD(fake), ones)
            accelerator.backward(loss_g)
            optimizerG.step()

    loss_d = accelerator.reduce((loss_real + loss_fake).detach(), reduction="mean").item()
    loss_g = accelerator.reduce(loss_g.detach(), reduction="mean").item()
    accelerator.wait_for_everyone()
    samples = accelerator.unwrap_model(netG)(torch.ones(1, 4, device=accelerator.device)).flatten().tolist()
    accelerator.print(json.dumps({"loss_d": loss_d, "loss_g": loss_g, "sample": samples}))


if __name__ == "__main__":
    main()
