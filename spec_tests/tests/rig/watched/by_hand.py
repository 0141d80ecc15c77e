"""Style of PyTorch's tutorial "Writing distributed applications": no wrapper, one `all_reduce` for
each gradient, weights broadcast once; a GRU language model whose head is tied to its embedding.
"""

import frame
import torch
import torch.distributed as dist
import torch.nn as nn


class RNNModel(nn.Module):
    def __init__(self, vocab=90, dim=20):
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.encoder = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.Linear(dim, vocab)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(ids)), hidden)
        return self.decoder(self.drop(output)), hidden


def broadcast_parameters(model):
    for param in model.parameters():
        dist.broadcast(param.data, src=0)


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= size


def run(rank, world, args):
    torch.manual_seed(args.seed + rank)
    corpus = torch.randint(90, (world, 3, 400), generator=torch.Generator().manual_seed(args.seed))
    corpus = corpus.cumsum(-1) % 90
    model = RNNModel()
    broadcast_parameters(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    criterion = nn.CrossEntropyLoss()
    hidden = torch.zeros(1, 3, 20)
    for step in range(args.steps):
        window = corpus[rank, :, 10 * step % 380 : 10 * step % 380 + 11]
        hidden = hidden.detach()
        output, hidden = model(window[:, :-1], hidden)
        loss = criterion(output.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.4f}")
    frame.end(rank, model)


if __name__ == "__main__":
    run(*frame.start(), frame.arguments(seed=1234))
